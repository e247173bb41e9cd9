"""Save, prune and resume the checkpoints of a run."""

import contextlib
import math
import os
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from llm_demo.core.errors import Stopped, UserError
from llm_demo.core.mesh import World, local_part, on_device
from llm_demo.flags.args import Args, names_of
from llm_demo.machine.device import free_host_memory, pin
from llm_demo.machine.dist import from_rank0, lost_peer, on_all_ranks, timeout
from llm_demo.machine.files import PART
from llm_demo.machine.process import stop_signals
from llm_demo.machine.text import differences, resume
from llm_demo.model.weights_files import refuse_other_adapters
from llm_demo.run import checkpoint_files
from llm_demo.run.folder import last_checkpoint, published
from llm_demo.run.log import Log


class Saver:
    """Saves, prunes and resumes a run's checkpoints.

    identity: what the rows of a step depend on. copies: the tensors to save are already copies on
    the CPU (gathered by a pipeline's replicas), not the trained ones. adapters: Lora.facts() if the
    run trains those instead of the model. model: its configuration. describe(), which is set later:
    called on rank 0 once this run owns the folder, to write what an export needs beside the
    checkpoint."""

    def __init__(
        self,
        args: Args,
        world: World,
        log: Log,
        identity: dict,
        *,
        copies: bool = False,
        adapters: dict | None = None,
        model: dict | None = None,
    ):
        self.args, self.world, self.log = args, world, log
        self.identity, self.copies, self.describe = identity, copies, lambda: None
        self.adapters, self.model = adapters, model or {}
        self.in_background = True  # unless the host is short of memory
        self.folder = log.folder / "checkpoints"
        self.settings = {k: log.settings[k] for k in names_of("resume") if k in log.settings}
        # its own group: the writing thread communicates while the ranks train
        self.group = dist.new_group(backend="gloo", timeout=timeout())
        self.thread = self.problem = None
        self.published: dict | None = None  # the record of a checkpoint that is to be logged
        self.staged, self.reserving = {}, None
        # of a script's weights, on the CPU: those that all ranks must have made together
        self.meshes = {}
        self.stop = False  # a signal has asked the run to stop
        if args.save and world.local_size < world.size:
            self._require_shared_folder()
        started = time.perf_counter()
        self.path = checkpoint_files.find_checkpoint(args.resume, log.folder, world, say=log.say)
        # the checkpoint is of this run's folder, not of another run
        self.continues = self.path is not None and self.path.parent == self.folder
        self.seconds = time.perf_counter() - started
        self.facts, self.first_step = {}, 0
        if self.path:
            self.facts = from_rank0(world, lambda: checkpoint_files.checked_facts(self.path))
            self.first_step = self.facts["step"]
            refuse_other_adapters(self.path, self.facts.get("adapters"), self.adapters)
            start = (self.adapters or {}).get("start")
            if start:
                log.say(f"resume: adapters continue from the checkpoint, not from {start['path']}")
            self._compare()

    def _refuse(self, text: str, advice: str = "") -> None:
        """Raise UserError, or only log the difference with --resume_anyway."""
        if not self.args.resume_anyway:
            raise UserError(f"{text}; {advice}to continue anyway, add --resume_anyway")
        self.log.say(f"resume: {text}; continuing because of --resume_anyway")

    def _compare(self) -> None:
        """Raise UserError if the checkpoint is of another configuration or of different rows; log
        settings that differ."""
        # only entries that both have: another version of transformers may have more
        before = {k: v for k, v in self.facts.get("model", {}).items() if k in self.model}
        changes = differences(before, {k: self.model[k] for k in before})
        if changes:
            text = f"{self.path}: the model's configuration has changed: {'; '.join(changes)}"
            self._refuse(text)
        # "reading": counts that the checksum of tokens and labels has replaced
        before = {k: v for k, v in self.facts.get("identity", {}).items() if k != "reading"}
        changes = differences(before, self.identity)
        if changes:
            text = f"{self.path} was trained on different rows: {'; '.join(changes)}"
            advice = ""
            if any("data file" in change for change in changes):
                flag = "adapter" if self.adapters else "model_name_or_path"
                advice = (
                    f"to train its model on other data, export it (python -m llm_demo.export "
                    f"{shlex.quote(str(self.path))} OUT) and start a new run with --{flag} OUT; "
                )
            self._refuse(text, advice)
        before = self.facts.get("settings", {})
        # a script without a flag has it at its value without effect
        now = {k: self.settings.get(k, getattr(self.args, k, None)) for k in before}
        changes = differences(before, now)
        if changes:
            self.log.say(f"resume: settings changed: {'; '.join(changes)}")

    def _require_shared_folder(self) -> None:
        """Raise UserError, on all ranks, if a node can't see the run's folder to write its part.
        Nothing is created or emptied yet, so an existing parent folder is tested."""

        def make():
            above = next(p for p in self.folder.absolute().parents if p.exists())
            return Path(tempfile.mkdtemp(prefix=".seen-", dir=above))

        def look():
            for _ in range(50):  # 5 s, since a network file system may lag
                if mark.exists():
                    return
                time.sleep(0.1)
            raise OSError(
                f"rank {self.world.rank} can't see {mark.parent}: set an --output_dir that all "
                "nodes share, or add --save false"
            )

        mark = from_rank0(self.world, make)
        try:
            on_all_ranks(look, self.world)
        except OSError as e:
            raise UserError(str(e)) from None
        finally:
            if self.world.rank == 0:
                mark.rmdir()

    def load(self, tensors: dict) -> None:
        """Fill tensors from the checkpoint that --resume found."""
        started = time.perf_counter()
        checkpoint_files.load(self.path, tensors, self.world, group=self.group, say=self.log.say)
        load_rng(self.path, self.world)
        seconds = self.seconds + time.perf_counter() - started
        self.log.say(
            f"resume: {self.path}, after step {self.first_step}, checked and read in "
            f"{seconds:.2f} s"
        )

    def listen(self) -> None:
        """From now on, a signal ends the run after the current step, with a checkpoint."""
        if not self.args.save:
            return
        for number in stop_signals():
            signal.signal(number, self._ask)

    def prepare_folder(self, state: Callable[[], dict], last: bool) -> None:
        """After the run's first step, which may be its `last`: describe the model, remove what an
        earlier process left, prepare for saves in the background. state() -> {name: tensor}."""
        if self.world.rank == 0:
            self.describe()
            self.tidy()
        if self.args.save_every and self.in_background and not self.copies and not last:
            self._reserve(state())

    def tidy(self) -> None:
        """Clean up the checkpoint folder, once this run owns it. Rank 0."""
        for left in self.folder.glob(f"{PART}*"):  # left by a killed run
            shutil.rmtree(left, ignore_errors=True)
        for path in published(self.folder):
            if int(path.name[-8:]) > self.first_step:  # skipped on resume: don't count it
                aside = path.with_name(f"damaged_{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        if self.args.export != "none":  # from an earlier end of this run
            shutil.rmtree(self.log.folder / "hf", ignore_errors=True)

    def _ask(self, *_signal):
        if self.world.rank == 0 and not self.stop:  # print() may be interrupted in a print()
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(1, b"stopping: a checkpoint is saved after the step that is under way\n")
        self.stop = True

    def stop_asked(self) -> bool:
        """Whether any rank has received a signal to stop. Every rank calls. Raises UserError, on
        all of them, if a checkpoint could not be written."""
        if not self.args.save:
            return False
        self._report()
        stop = torch.tensor(2 if self.problem else int(self.stop))
        dist.all_reduce(stop, dist.ReduceOp.MAX)  # on the CPU: the GPU keeps working
        if stop == 2:
            self.finish()
        return bool(stop)

    def stopped(self, where: str) -> Stopped:
        """The end of a run that a signal has asked for, with how to continue."""
        return Stopped(f"stopped {where}; to continue: {resume(self.log.folder)}")

    def save(self, step: int, tensors: dict, facts: dict, wait: bool) -> None:
        """Write a checkpoint, in the background unless `wait`. Training pauses until its tensors
        are copied. Raises UserError if this checkpoint or the previous one can't be written."""
        started = time.perf_counter()
        self.finish()
        from_rank0(self.world, self._make_folder)
        self._refuse_non_finite(step, tensors)
        tensors = {**tensors, **rng_state(self.world)}
        facts = {"step": step, **facts, "identity": self.identity, "settings": self.settings}
        facts |= {"model": self.model} | ({"adapters": self.adapters} if self.adapters else {})
        name = f"step_{step:08d}"
        if wait or not self.in_background:
            self._write(name, tensors, facts, started)
            self.finish()
        else:
            work = (name, self._stage(tensors), facts, started, time.perf_counter())
            self.thread = threading.Thread(target=self._write, args=work, daemon=True)
            self.thread.start()

    def _make_folder(self) -> None:
        with self.log.writing():
            self.folder.mkdir(exist_ok=True)  # not with parents: the run's folder may be gone

    def _refuse_non_finite(self, step: int, tensors: dict) -> None:
        """Raise UserError, on all ranks, if any rank has a non-finite weight or moment."""
        local = {name: local_part(t) for name, t in tensors.items()}
        local = {name: part for name, part in local.items() if part.numel()}
        mine = None
        if local:  # a rank may hold none
            largest = torch._foreach_norm([*local.values()], math.inf)
            finite = torch.stack(largest).isfinite().tolist()
            mine = next((name for name, f in zip(local, finite, strict=True) if not f), None)
        ranks = on_all_ranks(lambda: mine, self.world, self.group)
        name = next(filter(None, ranks), None)
        if name:
            raise UserError(
                f"step {step}: {name} is not finite, so no checkpoint is written: try a lower --lr "
                f"or --dtype fp32; {last_checkpoint(self.log.folder)}"
            )

    def finish(self) -> None:
        """Wait for the checkpoint being written. Raises UserError if it can't be written."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if self.problem:
            raise self.problem
        self._report()

    def _report(self) -> None:
        """Log the checkpoint, if the writing thread has just published one."""
        if not self.published:
            return
        record, self.published = self.published, None
        self.log.record(record)
        self.log.say(
            f"checkpoint: {self.folder}/step_{record['step']:08d}, "
            f"{record['save/bytes'] / 1e6:,.0f} MB in {record['save/seconds']:.2f} s, training "
            f"paused for {record['save/stall_s']:.2f} s"
        )

    def _reserve(self, tensors: dict) -> None:
        """Allocate memory for copies in the background, which takes seconds; pinned if they come
        from a GPU. If the host is short of memory, checkpoints are written in the foreground."""
        local = {name: local_part(t) for name, t in {**tensors, **rng_state(self.world)}.items()}
        sizes = [-(-t.nbytes // 64) * 64 for t in local.values()]
        room = 0.8 * free_host_memory()
        short = torch.tensor(int(sum(sizes) * self.world.local_size > room))
        dist.all_reduce(short, dist.ReduceOp.MAX)
        if short:
            self.in_background = False
            self.log.say("checkpoints: too little host memory for copies, so training waits")
            return

        def reserve():
            memory = torch.empty(sum(sizes), dtype=torch.uint8).zero_()
            if any(t.is_cuda for t in local.values()):
                torch.cuda.set_device(self.world.device)  # a new thread starts on device 0
                if not pin(memory, self):
                    self.log.say("checkpoints: memory can't be pinned, so copying is slow")
            for (name, t), part in zip(local.items(), memory.split(sizes), strict=True):
                self.staged[name] = part[: t.nbytes].view(t.dtype).view(t.shape)

        self.reserving = threading.Thread(target=reserve, daemon=True)
        self.reserving.start()

    def _stage(self, tensors: dict) -> dict:
        """Copy tensors to host memory, into the same buffers each time, pinned for a GPU."""
        if self.copies:
            return tensors
        if self.reserving:
            self.reserving.join()
        copies = {}
        for name, t in tensors.items():
            local = local_part(t)
            if name not in self.staged:
                self.staged[name] = torch.empty_like(local, device="cpu")
            copies[name] = self.staged[name].copy_(local, non_blocking=True)
            if isinstance(t, DTensor):
                mesh = self.meshes.get(t.device_mesh) or on_device(t.device_mesh, "cpu")
                copies[name] = DTensor.from_local(
                    copies[name], mesh, t.placements, shape=t.shape, stride=t.stride()
                )
        torch.get_device_module(self.world.device).synchronize()
        return copies

    def _write(self, name: str, tensors: dict, facts: dict, started, training_resumed=None) -> None:
        part, final = self.folder / f"{PART}{name}", self.folder / name
        try:
            size = checkpoint_files.write(part, tensors, facts, self.world, self.group)

            def show():
                if self.world.rank == 0:
                    checkpoint_files.publish(part, final)
                    self._prune(name, facts["evals"])

            on_all_ranks(show, self.world, self.group)
            now = time.perf_counter()
            self.published = {
                "step": facts["step"],
                "save/bytes": size,
                "save/seconds": round(now - started, 3),
                "save/stall_s": round((training_resumed or now) - started, 3),
            }
        except (Exception, dcp.CheckpointException) as e:  # in a thread: reported at the next step
            problem = f"checkpoint {final} can't be written: {checkpoint_files.reason_of(e, part)}"
            self.problem = UserError(f"{problem}; {last_checkpoint(self.log.folder)}")
            if self.log.gone():
                self.problem = UserError(self.log.gone())
            elif lost_peer(e):  # its end is what went wrong, not the writing
                self.problem = RuntimeError(str(e))
            if self.world.rank == 0:
                shutil.rmtree(part, ignore_errors=True)

    def _prune(self, newest: str, evals: list[tuple[int, float]]) -> None:
        """Keep the newest, the K newest, and the best by held-out loss; remove the rest. evals:
        (step, loss), of the whole run. Rank 0."""
        if not self.args.keep_last:
            return
        names = [path.name for path in published(self.folder)]
        keep = {newest, *names[: self.args.keep_last]}
        if self.args.early_stopping:
            losses = {f"step_{step:08d}": loss for step, loss in evals if math.isfinite(loss)}
            keep |= {min((n for n in names if n in losses), key=losses.get, default=newest)}
        for name in set(names) - keep:
            (self.folder / name).rename(self.folder / f"{PART}{name}")
            shutil.rmtree(self.folder / f"{PART}{name}", ignore_errors=True)


def rng_state(world: World) -> dict[str, torch.Tensor]:
    """{name: state} of this rank's random generators. Only --lora_dropout draws from them."""
    state = {f"rng.cpu.{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"rng.cuda.{world.rank}"] = torch.cuda.get_rng_state()
    return state


def load_rng(path: Path, world: World) -> None:
    """Restore the generators, if the checkpoint has states for this rank."""
    saved = checkpoint_files.read_metadata(path).state_dict_metadata
    state = {name: t for name, t in rng_state(world).items() if name in saved}
    checkpoint_files.read_tensors(path, state)
    for name, t in state.items():
        (torch.cuda if "cuda" in name else torch).set_rng_state(t)
