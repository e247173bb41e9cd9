"""The numbers of a step, which a device copies to the host while the host goes on."""

from types import SimpleNamespace

import torch

from llm_demo.device import World
from llm_demo.run.clock import Clock
from llm_demo.run.comm import _Clock


def test_numbers_of_the_last_step_are_read_after_their_copies():
    """They are read at once, not a step later: an event before the copies is not enough."""
    copies, records = [], []

    class Copy:
        there = False

        def __float__(self):
            assert self.there, "read before it was copied"
            return 2.5

    class OnDevice:
        def detach(self):
            return self

        def to(self, device, non_blocking):
            copies.append(Copy())
            return copies[-1]

    class Event(_Clock):
        def record(self):
            super().record()
            self.earlier = list(copies)

        def synchronize(self):
            for copy in self.earlier:
                copy.there = True

    args = SimpleNamespace(
        profile_steps=None, log_every=1, max_skipped_steps=0, peak_tflops=None, comm_timer=False
    )
    log = SimpleNamespace(open=lambda step: [], record=records.append, say=lambda line: None)
    clock = Clock(args, World(0, 1, 0, torch.device("cpu")), log, 1, 1.0, torch.float32)
    clock.comm._new = Event
    clock.gather = SimpleNamespace(floats=lambda mine: [mine], waits=lambda operations: [0.0])
    clock.more["moe/aux_loss"] = OnDevice()
    clock.begin()
    clock.end_step(1, 10, 5, 10, OnDevice(), 1.0, 1e-3)
    assert (records[0]["train/loss"], records[0]["moe/aux_loss"]) == (2.5, 2.5)
