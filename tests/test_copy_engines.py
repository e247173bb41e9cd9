"""When GPUs copy from one another instead of calling NCCL, and that what they copy is whole."""

import pytest
import torch
from conftest import torchrun

from llm_demo import copy_engines
from llm_demo.device import Device
from llm_demo.dist import World
from llm_demo.errors import UserError

H200 = Device("cuda", "nvidia", "NVIDIA H200", "sm_90", 140.0)
MI100 = Device("cuda", "amd", "AMD Instinct MI100", "gfx908", 32.0)


@pytest.mark.parametrize(
    "asked, device, world, change, link, chosen, reason",
    [
        (None, H200, 2, {}, "NV18", True, "no multiprocessors"),
        (None, H200, 2, {}, "PIX", False, "not measured over PIX; --copy_engines tries it"),
        (None, H200, 2, {}, None, False, "not measured over None"),
        (True, H200, 2, {}, "PIX", True, "as asked"),
        (False, H200, 2, {}, "NV18", False, "as asked"),
        (
            None,
            H200,
            2,
            {"unit": 63_000_000},
            "NV18",
            False,
            "63M parameters at a time",
        ),
        (True, H200, 2, {"unit": 63_000_000}, "NV18", True, "as asked"),
        (None, MI100, 2, {}, "XGMI", False, "for NVIDIA's GPUs"),
        (None, H200, 1, {}, "NV18", False, "nobody to copy from"),
        (None, H200, 4, {}, "NV18", False, "for one node, and this one has 2 of 4 ranks"),
        (None, H200, 2, {"NCCL_P2P_DISABLE": "1"}, "NV18", False, "NCCL_P2P_DISABLE"),
        (True, H200, 2, {"NCCL_P2P_DISABLE": "1"}, "NV18", UserError, "NCCL_P2P_DISABLE"),
        (None, H200, 2, {"peers": False}, "NV18", False, "can't reach"),
        (None, H200, 2, {"pool": False}, "NV18", False, "no pool"),
        (None, H200, 2, {"fails": "a first gather failed: x"}, "NV18", False, "gather failed: x"),
    ],
)
def test_the_choice(asked, device, world, change, link, chosen, reason, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(world, 2)))
    monkeypatch.setenv("NCCL_P2P_DISABLE", change.get("NCCL_P2P_DISABLE", "0"))
    monkeypatch.setattr(copy_engines, "this_device", lambda index: device)
    monkeypatch.setattr(copy_engines, "from_rank0", lambda world, make: make())
    monkeypatch.setattr(copy_engines, "link", lambda: link)
    monkeypatch.setattr(copy_engines, "_fails", lambda world: change.get("fails"))
    monkeypatch.setattr(copy_engines, "symmetric", type("S", (), {"get_mem_pool": 1}))
    if not change.get("pool", True):
        monkeypatch.setattr(copy_engines, "symmetric", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    can = change.get("peers", True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: can)
    gathered = lambda found, mine: found.__setitem__(slice(None), [None, mine])  # noqa: E731
    monkeypatch.setattr(copy_engines.dist, "all_gather_object", gathered)
    here = World(1, world, 1, torch.device("cuda", 1))
    if chosen is UserError:
        with pytest.raises(UserError, match=f"--copy_engines: .*{reason}"):
            copy_engines.choose(asked, here, change.get("unit", 193_000_000))
    else:
        found, why = copy_engines.choose(asked, here, change.get("unit", 193_000_000))
        assert found == chosen and reason in why


COPIES = """
import torch
from llm_demo import copy_engines
from llm_demo.dist import start, run

def main():
    world = start()
    assert copy_engines.choose(True, world, 1) == (True, "as asked")
    n, me = world.size, world.rank
    side = torch.cuda.Stream()
    busy = torch.randn(8192, 8192, device=world.device)
    for size in (1 << 10, 1 << 26, 3 << 20, 1 << 26, 1 << 25):  # with new memory and with old
        for _ in range(50):  # the default stream has work for long
            busy = (busy @ busy).clamp(-1, 1)
        with torch.cuda.stream(side):
            whole = copy_engines.shared_empty(n * size, torch.bfloat16, world.device)
            whole.chunk(n)[me].fill_(me + 1)
            copy_engines.all_gather(whole)
            sent = copy_engines.shared_empty(n * size, torch.bfloat16, world.device)
            for peer, part in enumerate(sent.chunk(n)):
                part.fill_(10 * me + peer)
            found = copy_engines.all_to_all(sent)
            both = whole.clone(), [part.clone() for part in found]
            del whole, sent, found, part
            reused = len(copy_engines.segments[side.cuda_stream])
        torch.cuda.synchronize()
        for peer in range(n):
            assert (both[0].chunk(n)[peer] == peer + 1).all(), (size, peer, "gather")
            assert both[1][peer].numel() == size, (size, peer)
            assert (both[1][peer] == 10 * peer + me).all(), (size, peer, "all to all")
    assert reused == 4, reused  # two small ones, two large ones

run(main)
"""


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_what_is_copied_is_whole(tmp_path):
    """On a busy GPU, too: PyTorch 2.11 erases new memory after it has been written, if let."""
    (tmp_path / "copies.py").write_text(COPIES)
    torchrun(2, tmp_path / "copies.py")
