"""The static report: its arithmetic by hand, and one operator compiled and written out."""

import csv
import json

import pytest

pytest.importorskip("triton")

from benchmarks.compiled import everywhere, occupancy, static_report
from benchmarks.compiled.cases import ARCHITECTURES, CASES, Case
from rbm_kernels import _ahead_of_time, _machine_code
from rbm_kernels._ahead_of_time import Compiled


def compiled(**changes) -> Compiled:
    fields = {
        "name": "expert_matmul_fwd_kernel",
        "blocks": {"BLOCK_M": 128, "BLOCK_N": 256},
        "num_warps": 8,
        "num_stages": 3,
        "registers": 121,
        "spilled_bytes": 0,
        "shared_bytes": 100 * 1024,
        "tensor_columns": 0,
        "instructions": {},
        "main_loop": {},
    }
    return Compiled(**{**fields, **changes})


def test_programs():
    # 65,536 registers; 121 are handed out as 128, times 256 threads.
    assert occupancy.programs_by_registers(121, 8) == 2
    assert occupancy.programs_by_registers(128, 8) == 2
    assert occupancy.programs_by_registers(129, 8) == 1
    # 228 KB, of which each program takes one more than its own.
    assert occupancy.programs_by_shared(113 * 1024, 90) == 2
    assert occupancy.programs_by_shared(114 * 1024, 90) == 1
    assert occupancy.programs_by_shared(228 * 1024, 90) == 0
    assert occupancy.programs_by_shared(100 * 1024, 120) == 0
    assert occupancy.programs(32, 8, 0, 0, 90) == 8  # 64 warps
    assert occupancy.programs(32, 8, 0, 0, 120) == 6  # 48 warps
    assert occupancy.programs(24, 1, 0, 0, 90) == 32
    assert occupancy.programs(64, 8, 0, 256, 100) == 2  # 512 columns of tensor memory


def test_a_row_counts_what_its_instructions_do():
    instructions = {
        "HGMMA.64x256x16.F32.BF16": 4,
        "HGMMA.64x256x8.F32.TF32": 1,
        "UTCHMMA": 2,
        "LDG.E": 5,
        "LDG.E.128": 6,
        "LDG.E.128.CONSTANT": 1,
        "LDGSTS.E.BYPASS.LTC128B.128": 7,
        "LDGSTS.E.LTC128B.64": 1,
        "LDGDEPBAR": 3,
        "UTMALDG.2D": 1,
        "ATOMS.ADD": 1,
        "ATOMG.E.ADD": 1,
        "REDUX": 1,
        "RED.E.ADD": 1,
    }
    case = Case("expert_matmul", "tf32")
    row = static_report.row(case, "y", 90, compiled(instructions=instructions))
    assert row.matrix_instructions == "HGMMA 5 UTCHMMA 2"
    assert (row.wide_loads, row.loads, row.atomics) == (15, 21, 2)
    assert (row.tile, row.shape) == ("M=128 N=256", "B=169,343 D=256 N=256 E=8 k=3")
    assert (row.programs_by_registers, row.programs_by_shared, row.programs, row.programs_claimed) == (2, 2, 2, 3)


def test_a_row_counts_what_its_main_loop_does():
    # 128 x 256 x 64 multiply-adds take 1,024 cycles at 2,048 a cycle; eight warps issue 512 instructions in as many.
    loop = {"HGMMA.64x256x16.F32.BF16": 4, "LDS": 3, "LDS.128": 2, "STS.U16": 5, "STS.U8": 1, "LDSM.16.M88.4": 7}
    loop |= {"BAR.SYNC.DEFER_BLOCKING": 2, "FFMA": 512 - 24}
    row = static_report.row(Case("expert_matmul", "bfloat16"), "y", 90, compiled(main_loop=loop))
    assert (row.loop_instructions, row.loop_issue_share, row.loop_barriers) == (512, 1.0, 2)
    assert row.loop_shared_accesses == "LDS.128 2 LDS.32 3 STS.16 5 STS.8 1"
    # A warp of sm_80 multiplies 16 x 8 x 16 by itself, half as fast in TF32, which is half as deep.
    loop = {"HMMA.16816.F32.BF16": 128, "IADD3": 128}
    row = static_report.row(Case("expert_matmul", "bfloat16"), "y", 80, compiled(main_loop=loop))
    assert row.loop_issue_share == 256 * 8 / 4 / (128 * 8 * 2048 / 1024)
    loop = {"HMMA.1688.F32.TF32": 128, "IADD3": 128}
    row = static_report.row(Case("expert_matmul", "tf32"), "y", 80, compiled(main_loop=loop))
    assert row.loop_issue_share == 256 * 8 / 4 / (128 * 8 * 1024 / 512)
    assert static_report.row(Case("expert_matmul", "bfloat16"), "y", 90, compiled()).loop_issue_share is None


def test_the_main_loop_is_the_innermost_that_multiplies_most():
    listing = _machine_code._Listing()
    code = """
        /*0000*/ MOV R1, c[0x0][0x28] ;
        /*0010*/ IADD3 R2, R2, 0x1, RZ ;
        /*0020*/ HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/ HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/ @P0 BRA 0x20 ;
        /*0050*/ HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/ LDS.U16 R3, [R4] ;
        /*0070*/ @!P1 BRA P2, 0x50 ;
        /*0080*/ @P3 BRA 0x10 ;
        /*0090*/ EXIT ;
        /*00a0*/ BRA 0xa0;
    """
    for line in code.splitlines():
        if match := _machine_code._INSTRUCTION.match(line):
            listing.add(line, match)
    assert sum(listing.counts().values()) == 11
    assert listing.main_loop() == {"HGMMA.64x256x16.F32.BF16": 1, "LDS.U16": 1, "BRA": 1}


def test_written_as_csv_and_markdown(tmp_path, capsys, monkeypatch):
    out = tmp_path / "report.csv"
    chosen = [case for case in CASES if case.operator == "expert_order"][:2]
    monkeypatch.setattr(static_report, "CASES", chosen)
    static_report.main(out, operator=["expert_order"], architecture=[80])
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["shape"] for line in lines} == {str(case) for case in chosen}
    assert {line["kernel"] for line in lines} >= {"expert_order_select_kernel", "expert_order_tiles_kernel"}
    for line in lines:
        assert line["architecture"] == "80"
        assert 0 < int(line["registers"]) <= 255
        assert line["triton"]
        assert line["commit"]
        assert line["date"]
    table = out.with_suffix(".md").read_text().splitlines()
    assert "## expert_order" in table
    assert sum(line.startswith("| order |") for line in table) == len(lines)
    assert f"{len(lines)} rows written" in capsys.readouterr().err.replace("\n", " ")


def committed() -> dict[str, static_report.Row]:
    found = everywhere.read_rows(everywhere.REPORT)
    assert found, (
        "other code read the machine code of the committed report: run python -m benchmarks.compiled.static_report"
    )
    return found


def test_rows_of_the_committed_report_are_what_compiling_gives():
    """Cases of two operators for one architecture, drawn by the rows' hashes: others once anything has changed."""
    rows = sorted(committed().values(), key=lambda row: row.source_hash)
    drawn = list({row.operator: row.shape for row in reversed(rows)}.items())[-2:]
    cases = [next(case for case in CASES if (case.operator, str(case)) == each) for each in drawn]
    architectures = (rows[0].architecture,)
    compiled, taken = (everywhere.compiled_cases(cases, architectures, report) for report in (None, everywhere.REPORT))
    assert compiled == taken
    assert len(compiled[rows[0].architecture]) > len(cases)


def test_a_kernel_is_compiled_where_the_report_does_not_know_it(tmp_path):
    case = next(case for case in CASES if case.operator == "routed_matmul")
    ((_, row),) = everywhere.compiled_cases([case], (90,), None)[90]
    report = tmp_path / "report.csv"

    def registers(**changes) -> int:
        line = {**vars(row), "registers": 7, "reader": static_report.reader_hash(), **changes}
        with report.open("w", newline="") as file:
            writer = csv.DictWriter(file, line)
            writer.writeheader()
            writer.writerow(line)
        ((_, found),) = everywhere.compiled_cases([case], (90,), report)[90]
        return found.registers

    assert registers() == 7, "taken from the report"
    assert registers(source_hash="0" * 64) == row.registers, "compiled"
    report.write_text(report.read_text().replace(static_report.reader_hash(), "another reader"))
    assert everywhere.read_rows(report) == {}


def test_rows_stay_valid_if_only_prose_changed():
    """Regression test: new docstrings made all rows of the committed report unknown, and tests skipped."""
    source = [
        '"""A module."""',
        "def half(x):",
        '    """Of a number."""',
        "    # Exact.",
        "    return x / 2  # a float",
        "",
    ]
    bare = "def half(x):\n    return x / 2"
    assert static_report.without_prose("\n".join(source)) == static_report.without_prose(bare) == bare
    assert static_report.without_prose(bare.replace("2", "3")) != bare
    assert static_report.without_prose("x = '# text'") == "x = '# text'"


def test_a_program_that_does_not_compile():
    programs = ["raise ValueError('too many experts')", "pass"]
    with pytest.raises(RuntimeError, match=r"did not compile for sm_90(.|\n)*too many experts"):
        list(_ahead_of_time.compile_launches(programs, 90))
    assert list(_ahead_of_time.compile_launches(programs, 90, skip_failures=True)) == []
    with pytest.raises(RuntimeError, match=r"did not compile for sm_(80|90)(.|\n)*too many experts"):
        _ahead_of_time.compile_for_all(programs, (80, 90))


def test_kernels_read_together_say_what_each_says_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # where the cubins are then found
    case = next(case for case in CASES if case.operator == "expert_order")
    program = f"from benchmarks.compiled import cases; cases.launch_meta(cases.{case!r}, 'order')"
    architectures = ARCHITECTURES[:2]
    compiled = _ahead_of_time.compile_for_all([program], architectures, before="from benchmarks.compiled import cases")
    files = {architecture: [] for architecture in architectures}
    for file in sorted(tmp_path.rglob("*.cubin")):
        files[json.loads(file.with_suffix(".json").read_text())["target"]["arch"]].append(file)
    for architecture, cubins in files.items():
        assert len(compiled[architecture]) == len(cubins) > 1
        one_by_one = [next(iter(_machine_code.read(file).values())) for file in cubins]
        together = _machine_code.read_together([file.read_bytes() for file in cubins], architecture)
        assert together == one_by_one
        assert len({str(code) for code in together}) == len(cubins), "kernels that tell one order from another"
        kernels = [kernel for _, kernel in compiled[architecture]]
        assert sorted(kernel.registers for kernel in kernels) == sorted(code.registers for code in together)
