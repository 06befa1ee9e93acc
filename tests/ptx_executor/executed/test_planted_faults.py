"""Faults planted into the compiled text of our kernels: each is found, by a watcher or by the result."""

import re
from unittest import mock

import pytest
import torch
from matmul_problems import problem
from tile_heights import set_tile_rows

from ptx_executor.gpu import Gpu
from ptx_executor.program import Program, WatcherError
from rbm_kernels import expert_order
from rbm_kernels.ops.cosine_topk import launch as routing
from rbm_kernels.ops.expert_matmul import launch
from rbm_kernels.ops.expert_order import launch as order_launch

FORWARD = "expert_matmul_fwd_kernel"
# The results of these tests' work without a fault.
SOUND = {}


@pytest.fixture(autouse=True)
def _tiles(monkeypatch, device):
    set_tile_rows(monkeypatch, 128)


def multiply():
    """``y`` of a grouped matmul in bfloat16, several slices deep, two tiles of rows and two of features."""
    x, weight, bias, gates, experts, _ = problem((200, 208, 264, 3, 2), torch.bfloat16, device="cpu")
    order = expert_order(experts, 3, 128)
    return launch.expert_matmul(x, weight, bias, gates, experts, *order)


def route():
    """Cosines of rows whose number and width fill no tile."""
    generator = torch.Generator().manual_seed(0)
    h, memory = (torch.randn(n, 50, generator=generator) for n in (77, 6))
    return routing.cosine_topk(h, memory, 2)[2]


def list_tiles():
    """The order of a few rows."""
    return order_launch.expert_order(torch.arange(180, dtype=torch.int32).view(60, 3) % 7, 7, 16)[0]


class Fault:
    """An edit of a kernel's text. ``pattern`` is replaced where it stands for the time ``nth``; -1: everywhere."""

    def __init__(self, pattern: str, replacement: str, nth: int = 0):
        self.pattern, self.replacement, self.nth, self.planted = pattern, replacement, nth, False

    def __call__(self, name: str, text: str) -> str:
        places = list(re.finditer(self.pattern, text))
        if len(places) <= max(self.nth, 0):
            raise LookupError(f"{self.pattern} stands {len(places)} times in {name}")
        self.planted = True
        chosen = places if self.nth < 0 else [places[self.nth]]
        for match in reversed(chosen):
            text = text[: match.start()] + match.expand(self.replacement) + text[match.end() :]
        return text


def outcome(architecture: int, work, edit=None):
    """The result, or a watcher's report."""
    with Gpu(architecture, edit=edit) as gpu, gpu.watching():
        try:
            return work()
        except (WatcherError, AssertionError) as found:
            return found


def check_found(architecture: int, work, edit, *kinds: str) -> None:
    """``kinds``: the watchers that may have seen it; "result": or the result differs."""
    if work not in SOUND:
        SOUND[work] = outcome(architecture, work)
    sound = SOUND[work]
    assert isinstance(sound, torch.Tensor), sound
    found = outcome(architecture, work, edit)
    assert edit.planted
    if isinstance(found, WatcherError):
        assert found.kind in kinds, found
    elif isinstance(found, AssertionError):
        assert "bits" in kinds, found
    else:
        assert "result" in kinds
        assert not torch.equal(found, sound), "nothing noticed the fault"


# The last wait of a pipeline may have nothing to wait for; the first has.
WAIT = r"cp\.async\.wait_group\s+(\d+);"


def one_more(match: str = WAIT) -> Fault:
    class OneMore(Fault):
        def __call__(self, name, text):
            found = re.search(self.pattern, text)
            self.replacement = f"cp.async.wait_group {int(found[1]) + 1};"
            return super().__call__(name, text)

    return OneMore(match, "")


def test_a_wait_removed(architecture):
    check_found(architecture, multiply, Fault(WAIT, ""), "copy not waited for")


def test_a_wait_for_one_group_less(architecture):
    check_found(architecture, multiply, one_more(), "copy not waited for")


def test_a_barrier_removed(architecture):
    """Those after the waits: other warps' copies."""
    edit = Fault(WAIT + r"(\s*(?://[^\n]*|\.loc[^\n]*)?\n)*?\s*bar\.sync\s+0;", r"cp.async.wait_group \1;", -1)
    check_found(architecture, multiply, edit, "race between warps", "copy not waited for", "unwritten")


def test_a_swizzle_changed(architecture):
    """Where the copies of a tile go: one exclusive or takes another bit."""
    edit = Fault(r"cp\.async\.c[ag]\.shared\.global \[ (%r\d+) \+ 0 \]", r"xor.b32 \1, \1, 32;\n\g<0>")
    check_found(architecture, multiply, edit, "unwritten", "copy not waited for", "race between warps", "result")


def test_a_store_without_its_predicate(architecture):
    edit = Fault(r"@%p\d+ (st\.global)", r"\1", -1)
    check_found(architecture, route, edit, "out of bounds", "race between blocks")


def test_a_load_without_its_mask(architecture):
    edit = Fault(r"@%p\d+ (ld\.global)", r"\1", -1)
    check_found(architecture, list_tiles, edit, "out of bounds", "unwritten")


def test_operands_swapped(architecture):
    if architecture == 90:
        edit = Fault(r"(wgmma\.mma_async[^{]*\{[^}]*\}, )(%rd\d+), (%rd\d+)", r"\1\3, \2")
    else:
        edit = Fault(r"(mma\.sync[^{]*\{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2")
    check_found(architecture, multiply, edit, "result", "unwritten", "out of bounds")


def test_a_matrix_not_transposed(architecture):
    if architecture == 90:
        pytest.skip("the operand that is transposed on sm_80 is read by wgmma here")
    x, weight, bias, gates, experts, grad = problem((200, 80, 72, 3, 2), torch.bfloat16, device="cpu")
    order = expert_order(experts, 3, 128)

    def backward():
        return launch.backward_input(grad, x, weight, bias, gates, experts, False, *order)[0]

    check_found(architecture, backward, Fault(r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.trans", r"\1"), "result")


def test_an_index_off_by_2_31(architecture):
    edit = Fault(r"(mul\.wide\.s32|mad\.wide\.s32)(\s+%rd\d+, )(%r\d+)", r"xor.b32 \3, \3, 0x80000000;\n\1\2\3")
    check_found(architecture, route, edit, "out of bounds")


def test_a_buffer_one_stage_too_small(architecture):
    launched = Program.launch

    def with_less(self, *arguments, dynamic_shared, **options):
        return launched(self, *arguments, dynamic_shared=dynamic_shared - 8192, **options)

    edit = Fault(r"\.version", ".version")
    with mock.patch.object(Program, "launch", with_less):
        found = outcome(architecture, multiply, edit)
    assert isinstance(found, WatcherError)
    assert found.kind == "out of bounds"


def test_a_block_reads_its_neighbours_output(architecture):
    """The memory's address becomes that of the cosines."""
    edit = Fault(r"(ld\.param\.b64\s+%rd\d+, \[\w+_param_)0\]", r"\g<1>4]")
    check_found(architecture, route, edit, "race between blocks", "unwritten", "out of bounds")


def test_a_register_without_a_value(architecture):
    edit = Fault(r"mov\.u32\s+%r\d+, %tid\.x;", "")
    check_found(architecture, route, edit, "unwritten")


def test_every_block_does_the_first_blocks_work(architecture):
    edit = Fault(r"%ctaid\.x", "0")
    check_found(architecture, route, edit, "race between blocks")


@pytest.fixture
def _hopper(architecture):
    if architecture != 90:
        pytest.skip("wgmma is sm_90's")


@pytest.mark.usefixtures("_hopper")
class TestWgmma:
    """What only Hopper's asynchronous multiplications can get wrong."""

    def test_a_fence_removed(self, architecture):
        check_found(architecture, multiply, Fault(r"wgmma\.fence\.sync\.aligned;", "", -1), "wgmma fence")

    def test_a_wait_removed(self, architecture):
        check_found(
            architecture, multiply, Fault(r"wgmma\.wait_group\.sync\.aligned \d+;", "", -1), "wgmma not waited for"
        )

    def test_a_descriptor_moved(self, architecture):
        """By 32 bytes: the next slice of the depth."""

        class Moved(Fault):
            def __call__(self, name, text):
                found = re.search(self.pattern, text)
                self.replacement = f"add.s64 {found[2]}, {found[2]}, 2;\n" + r"\1\2"
                return super().__call__(name, text)

        edit = Moved(r"(wgmma\.mma_async[^{]*\{[^}]*\}, %rd\d+, )(%rd\d+)", "")
        check_found(architecture, multiply, edit, "result", "unwritten", "out of bounds")

    def test_a_proxy_fence_removed(self, architecture):
        check_found(architecture, multiply, Fault(r"fence\.proxy\.async\.shared::cta;", "", -1), "proxy fence")
