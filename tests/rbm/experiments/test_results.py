"""The CSV file of an experiment: reading it writes nothing, and an edited file names the line at fault."""

import pytest

from rbm.experiments.results import COLUMNS, append_rows, read_rows

ROW = dict.fromkeys(COLUMNS, "0.5") | {"variant": "a", "method": "rbm", "seed": "0"}


def test_reading_rows_writes_nothing(tmp_path):
    """A last line without a newline is a row if it is complete, and ignored if a kill truncated it."""
    file, whole = tmp_path / "r.csv", ",".join(ROW.values())
    lines = [",".join(COLUMNS), whole]
    for text, count in (("\n".join(lines), 1), ("\n".join([*lines, whole[:20]]), 1), ("\n".join([*lines, ""]), 1)):
        file.write_text(text)
        assert len(read_rows(file)) == count
        assert file.read_text() == text
        append_rows(file, [{**ROW, "seed": "1"}])
        assert file.read_text() == "\n".join([*lines, ",".join({**ROW, "seed": "1"}.values()), ""])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", r"r\.csv is not text in UTF-8"),
        (b"a,b,c\n" * 3, r"r\.csv: line 2 has not the \d+ columns of a result"),
        (b"x" + b",x" * len(COLUMNS) + b"\n", r"r\.csv: line 2 has not the \d+ columns of a result"),
        (b'"' + b"x" * 140_000 + b"\n", r"r\.csv is no table of results: field larger"),
    ],
)
def test_rows_that_are_none(tmp_path, content, message):
    (tmp_path / "r.csv").write_bytes(",".join(COLUMNS).encode() + b"\n" + content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "r.csv")


def test_a_file_of_one_line_is_no_truncated_table(tmp_path):
    """Regression test: a note without a newline at its end was taken for a truncated line, and replaced by rows."""
    file = tmp_path / "note.txt"
    file.write_text("a note of mine")
    with pytest.raises(ValueError, match=r"note\.txt: line 1 lacks the columns dataset,"):
        read_rows(file)
    file.write_text(",".join(COLUMNS)[:20])  # the process was killed while it wrote the header
    assert read_rows(file) == []
    append_rows(file, [ROW])
    assert len(read_rows(file)) == 1


def table_text(*rows: dict[str, str], columns=COLUMNS) -> str:
    return "".join(f"{','.join(line)}\n" for line in (columns, *([row[name] for name in columns] for row in rows)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table_text({**ROW, "val": "0,5"}), "line 2 has not the"),
        (table_text(ROW, {**ROW, "seed": "1", "val": "n/a"}), "line 3 has 'n/a' as val, expected a number from 0 to 1"),
        (table_text({**ROW, "test_max": "nan"}), "line 2 has 'nan' as test_max"),
        (table_text({**ROW, "test_at_best_val": "97.3"}), "line 2 has '97.3' as test_at_best_val"),
        (table_text({**ROW, "seed": "0.0"}), "line 2 has the seed '0.0', expected a whole number"),
        (table_text({**ROW, "seed": "00"}), "line 2 has the seed '00'"),
        (
            table_text(ROW, {**ROW, "seed": "1"}, {**ROW, "val": "0.6"}),
            "lines 2 and 4 are both the row of 0.5 .* a rbm 0;",
        ),
        (table_text(ROW).replace("\n", "\n\n") + "\na,b\n", "line 6 has not the"),
        (
            table_text(ROW, columns=[name for name in COLUMNS if name != "val"]),
            "line 1 lacks the columns val; expected",
        ),
        (
            table_text({**ROW, "note": "1"}, columns=[*COLUMNS, "note"]),
            "line 1 has the columns 'note', which no result",
        ),
        (table_text(ROW, columns=COLUMNS[::-1]), "line 1 has the columns in another order"),
        (table_text(ROW).replace(",", ";"), "line 1 lacks .*, separated by commas"),
    ],
)
def test_an_edited_file_names_its_line(tmp_path, text, message):
    """Regression test: tables showed 9730 per cent, or of two rows with one key the last one."""
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"r\.csv: {message}"):
        read_rows(tmp_path / "r.csv")


@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n"])
def test_a_file_that_a_spreadsheet_has_saved_is_read(tmp_path, begin, newline):
    file = tmp_path / "r.csv"
    file.write_bytes((begin + table_text(ROW).replace("\n", newline)).encode())
    append_rows(file, [{**ROW, "seed": "1"}])
    assert read_rows(file) == [ROW, {**ROW, "seed": "1"}]
    file.write_text("".join(f'"{line}"\n' for line in table_text(ROW).replace(",", '","').splitlines()))
    assert read_rows(file) == [ROW], "every field in quotation marks"
