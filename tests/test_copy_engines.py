"""When GPUs copy from one another instead of calling NCCL, and that what they copy is whole."""

from types import SimpleNamespace

import pytest
import torch
from conftest import torchrun

from fsdp import copy_engines, fsdp2
from fsdp.build import choose_engines
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.core.timer import CommTimer
from llm_demo.machine.device import Device

H200 = Device("NVIDIA H200", "sm_90", 140.0)
MI100 = Device("AMD Instinct MI100", "gfx908", 32.0)


NV, FEW = ["NV18"], "no gain for units of 63M parameters"


@pytest.mark.parametrize(
    "asked, device, world, change, chosen, reason",
    [
        (None, H200, 2, {}, True, "no multiprocessors"),
        (None, H200, 2, {"links": ["PIX"]}, False, "over PIX; --copy_engines tries it"),
        (None, H200, 2, {"links": ["NV4", "SYS"]}, False, "over NV4, SYS"),
        (None, H200, 2, {"links": []}, False, "not measured over this link"),
        (True, H200, 2, {"links": ["PIX"]}, True, "as requested"),
        (False, H200, 2, {}, False, "as requested"),
        (None, H200, 2, {"no_gain": FEW}, False, "units of 63M parameters"),
        (True, H200, 2, {"no_gain": FEW}, True, "as requested"),
        (None, MI100, 2, {}, False, "NVIDIA GPUs only"),
        (True, MI100, 2, {}, UserError, "NVIDIA GPUs only"),
        (None, H200, 1, {}, False, "nothing to copy"),
        (None, H200, 4, {}, False, "4 ranks are not all on one node"),
        (None, H200, 2, {"sees": 1}, False, "only some of the node's GPUs"),
        (None, H200, 2, {"NCCL_P2P_DISABLE": "1"}, False, "NCCL_P2P_DISABLE"),
        (True, H200, 2, {"NCCL_P2P_DISABLE": "1"}, UserError, "NCCL_P2P_DISABLE"),
        (None, H200, 2, {"reach": {0: False}}, False, "can't reach"),
        (None, H200, 2, {"reach": {2: False, 3: False}}, True, "no multiprocessors"),
        (None, H200, 2, {"symmetric": None}, False, "no symmetric memory pool"),
        (None, H200, 2, {"other": "lacks it"}, False, "lacks it"),
        (None, H200, 2, {"fails": "_cannot_share"}, False, "a test failed: no memory"),
        (None, H200, 2, {"fails": "_cannot_gather"}, False, "a test failed: no memory"),
        (True, H200, 2, {"fails": "_cannot_gather"}, UserError, "a test failed"),
    ],
)
def test_the_choice(asked, device, world, change, chosen, reason, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(world, 2)))
    monkeypatch.setenv("NCCL_P2P_DISABLE", change.get("NCCL_P2P_DISABLE", "0"))
    reach, shared = change.get("reach", {}), []

    def gather(all_of, mine):
        all_of[:] = [change.get("other"), mine]

    machine = {
        "torch.cuda.device_count": lambda: change.get("sees", 4),
        "torch.cuda.can_device_access_peer": lambda mine, other: reach.get(other, mine == 1),
        "torch.distributed.all_gather_object": gather,
        "llm_demo.machine.device.links": lambda: change.get("links", NV),
        "fsdp.copy_engines.this_device": lambda index: device,
        "fsdp.copy_engines.from_rank0": lambda world, make: make(),
        "fsdp.copy_engines.symmetric": change.get("symmetric", type("S", (), {"get_mem_pool": 1})),
        "fsdp.copy_engines._cannot_share": lambda *_: shared.append(True),
        "fsdp.copy_engines._cannot_gather": lambda *_: None,
    }
    if "fails" in change:
        machine[f"fsdp.copy_engines.{change['fails']}"] = fails
    for name, part in machine.items():
        monkeypatch.setattr(name, part)
    world = World(1, world, 1, torch.device("cuda", 1))
    said = []
    arguments = asked, world, None, said.append, change.get("no_gain", "")
    if chosen is UserError:
        with pytest.raises(UserError, match=f"--copy_engines: .*{reason}"):
            copy_engines.choose_copy_engines(*arguments)
    else:
        assert copy_engines.choose_copy_engines(*arguments) == chosen
        [line] = said
        assert line.startswith(f"copy engines: {'yes' if chosen else 'no'} (") and reason in line
    assert not (shared and "other" in change)  # nobody waits for a rank that lacks something


def fails(*_):
    raise RuntimeError("no memory\nand more")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may gain")
@pytest.mark.parametrize(
    "size, reason", [(99_999_999, "units of 100M"), (100_000_000, "NVIDIA GPUs only")]
)
def test_fsdp_gathers_large_blocks_by_copy_engines(size, reason, alone):
    """The larger of two units has this many parameters. Shared ones count once."""

    def unit(n):
        made = torch.nn.Module()
        made.a = made.b = torch.nn.Parameter(torch.empty(n, device="meta"))
        return made

    said, facts = [], {}
    log = SimpleNamespace(say=said.append, resolved=facts.update)
    world = World(0, 1, 0, torch.device("cpu"))
    assert not choose_engines(None, world, None, [unit(4), unit(size)], log)
    assert reason in said[0] and facts == {"copy_engines": False}


def test_the_timer_sees_what_fsdp_copies(monkeypatch):
    """In memory that stands in for that of two GPUs."""
    total, sent = torch.ones(4), torch.ones(4, dtype=torch.bfloat16)
    handle = SimpleNamespace(world_size=2, rank=0, barrier=lambda: None)
    for memory in (total, sent):
        theirs = (torch.zeros_like(memory) + 2).chunk(2)
        others = lambda lent, theirs=theirs: [(1, theirs)]  # noqa: E731
        segment = SimpleNamespace(handle=handle, others=others)
        monkeypatch.setitem(copy_engines.by_address, memory.data_ptr(), segment)
    timer = CommTimer(torch.device("cpu"), 0, 2)
    timer.install()
    fsdp2.GatherByEngines(None, timer.call, None)(total, None, None)
    assert total.tolist() == [1, 1, 2, 2]
    exchange = fsdp2.SumInFp32(None, torch.bfloat16, None, compiles=False, timed=timer.call)
    exchange(total[:2], sent, None, torch.distributed.ReduceOp.SUM)
    timer.remove()
    assert [op[0][0] for op in timer.take()[0]] == ["copied all_gather", "copied all_to_all"]
    assert total.tolist() == [3, 3, 2, 2]


COPIES = """
import torch
from llm_demo.machine.dist import start, run
from fsdp import copy_engines
from llm_demo.core.mesh import make_mesh

def main():
    world = start()
    group = make_mesh(world, data=world.size).get_group()
    assert copy_engines.choose_copy_engines(True, world, group, print)
    n, me = world.size, world.rank
    side = torch.cuda.Stream()
    busy = torch.randn(8192, 8192, device=world.device)
    for size in (1 << 10, 1 << 26, 3 << 20, 1 << 26, 1 << 25):  # with new memory and with old
        for _ in range(50):  # the default stream has work for long
            busy = (busy @ busy).clamp(-1, 1)
        with torch.cuda.stream(side):
            whole = copy_engines.shared_empty(n * size, torch.bfloat16, world.device, group)
            whole.chunk(n)[me].fill_(me + 1)
            copy_engines.all_gather(whole)
            sent = copy_engines.shared_empty(n * size, torch.bfloat16, world.device, group)
            for peer, part in enumerate(sent.chunk(n)):
                part.fill_(10 * me + peer)
            parts = copy_engines.all_to_all(sent)
            both = whole.clone(), [part.clone() for part in parts]
            del whole, sent, parts, part
            reused = len(copy_engines.segments[group.group_name, side.cuda_stream])
        torch.cuda.synchronize()
        for peer in range(n):
            assert (both[0].chunk(n)[peer] == peer + 1).all(), (size, peer, "gather")
            assert both[1][peer].numel() == size, (size, peer)
            assert (both[1][peer] == 10 * peer + me).all(), (size, peer, "all to all")
    assert reused == 4, reused  # two small ones, two large ones

    def turn(call, fill):
        memory = copy_engines.shared_empty(n << 24, torch.bfloat16, world.device, group, "turns")
        for peer, part in enumerate(memory.chunk(n)):
            part.fill_(fill(peer))
        parts = call(memory) or memory.chunk(n)
        return [part.clone() for part in parts]

    main_stream = torch.cuda.current_stream()
    for step in range(3):
        with torch.cuda.stream(side):
            whole = turn(copy_engines.all_gather, lambda peer: me + step if peer == me else -1)
        main_stream.wait_stream(side)
        busy = (busy @ busy).clamp(-1, 1)
        parts = turn(copy_engines.all_to_all, lambda peer: 10 * me + peer + step)
        side.wait_stream(main_stream)
        for peer in range(n):
            assert (whole[peer] == peer + step).all(), (step, peer, "gather")
            assert (parts[peer] == 10 * peer + me + step).all(), (step, peer, "all to all")
    assert len(copy_engines.segments[group.group_name, "turns"]) == 1

    boxes = copy_engines.mailboxes(2, 1 << 24, torch.bfloat16, world.device)
    timed = lambda name, call, *args: call(*args)
    box = copy_engines.Mailbox(boxes, me, 1 - me, 1 - me, timed)
    main_stream.synchronize()
    for step in range(3 * box.SLOTS):
        busy = (busy @ busy).clamp(-1, 1)
        side.wait_stream(main_stream)
        with torch.cuda.stream(side):
            box.put(torch.full((2, (1 << 23) - step), me + step, device=world.device).bfloat16())
        if step >= box.SLOTS:  # the receiver is late
            t = box.take((2, (1 << 23) - (step - box.SLOTS)))
            assert (t == 1 - me + step - box.SLOTS).all(), step
    for step in range(2 * box.SLOTS, 3 * box.SLOTS):
        assert (box.take((2, (1 << 23) - step)) == 1 - me + step).all(), step

run(main)
"""


@pytest.mark.multi_gpu
def test_what_is_copied_is_whole(tmp_path):
    """On a busy GPU, too: PyTorch 2.11 erases new memory after it has been written, if let."""
    if reason := copy_engines._lacks(World(0, 2, 0, torch.device("cuda", 0))):
        pytest.skip(reason)
    (tmp_path / "copies.py").write_text(COPIES)
    torchrun(2, tmp_path / "copies.py")
