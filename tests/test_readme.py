"""The README names settings, flags and files that exist, and all settings there are."""

import re
import sys

import pytest
from conftest import ROOT, run

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def flags():
    scripts = ("fsdp/train_fsdp.py", "pp/pp_train.py")
    helps = [run([sys.executable, ROOT / script, "--help"]) for script in scripts]
    assert all(done.returncode == 0 for done in helps)
    return set(re.findall(r"--\w+", "".join(done.stdout for done in helps)))


def test_every_flag_named_exists(flags):
    named = set(re.findall(r"--\w+", README)) - {"--help", "--no_"}
    assert len(named) > 30
    assert named <= flags, named - flags


def test_every_setting_of_the_launchers_is_explained_with_its_flag(flags):
    for launcher in ("fsdp/launch_fsdp.sh", "pp/launch_pp.sh"):
        settings = re.findall(r"^(\w+)=\$\{\1-", (ROOT / launcher).read_text(), re.M)
        assert len(settings) >= 25
        for name in settings:
            row = next(line for line in README.splitlines() if f"`{name}`" in line)
            flag = {"MODEL": "--model_name_or_path"}.get(name, f"--{name.lower()}")
            assert flag in row and flag in flags


def test_every_file_named_exists():
    named = re.findall(r"\b(?:[\w.-]+/)*[\w-]+\.(?:py|sh|json|md)\b", README)
    left_by_a_run = {"config.json", "env.json", "cmd.sh", "summary.json"}
    missing = {n for n in named if n not in left_by_a_run and not (ROOT / n).exists()}
    assert not missing


def test_every_metric_is_explained():
    written = set(
        re.findall(r'"((?:train|perf|data|eval)/\w+)"', (ROOT / "llm_demo/metrics.py").read_text())
    )
    assert len(written) > 10
    assert all(f"`{key}`" in README for key in written)
