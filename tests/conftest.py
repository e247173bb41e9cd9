import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(command, cwd=ROOT, timeout=240, **env):
    """Run a command to its end; returns the CompletedProcess, output as text."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


def torchrun(processes: int, script, *args, **options):
    """Run a script in so many real processes; fails the test unless it ends well."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = run([sys.executable, *launch, script, *args], **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def pytest_terminal_summary(terminalreporter):
    """Say how many of the bad inputs tried got one clear line (tests record how many they try)."""
    tried = {
        outcome: sum(
            count
            for report in terminalreporter.stats.get(outcome, ())
            for name, count in getattr(report, "user_properties", ())
            if name == "bad inputs"
        )
        for outcome in ("passed", "failed")
    }
    if any(tried.values()):
        clear = f"{tried['passed']} clear / {sum(tried.values())} tried"
        terminalreporter.write_line(f"bad input: {clear}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Packs and probes of the tests go to a folder of their own."""
    os.environ["LLM_DEMO_CACHE"] = str(tmp_path_factory.mktemp("cache"))
