"""Write docs/flags.md, the table of all flags: python docs/make_flags.py

Flags come from llm_demo/flags/args.py and the flags.py beside each training script. The launchers'
own values come from the settings at their top. tests/test_flags.py fails when the page is stale.
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llm_demo.flags.args import SHARED  # noqa: E402
from llm_demo.flags.parsing import choices_of, env_of, flag_text, groups_of, kind_of  # noqa: E402
from llm_demo.launch.settings import BUNDLED, FIRST_RUN, read_launcher  # noqa: E402

TOP = """\
# Flags

Written by `python docs/make_flags.py`. Edit the texts in {files}.

- **On the command line**: `bash fsdp/launch_fsdp.sh --lr 2e-5`. Dashes may replace underscores.
  `--save` means `--save true`, and `--no_save` means `--save false`; all booleans work like this.
- **In the environment**: `LR=2e-5 bash fsdp/launch_fsdp.sh`. A launcher reads the variables in the
  column *environment* for the flags of its script. The scripts themselves and
  `fsdp/launch_script.py` do not.
- **At the top of a launcher** are the settings to edit: {settings}. You can add any other variable
  from the tables there, as in `SEED=${{SEED-7}}`.

A flag overrides the environment, which overrides the launcher. An empty value leaves the choice to
the script. If you set a number of epochs, the launcher's number of steps is not used. With the
bundled model and data ({bundled}), the launchers set {first_run} where these are empty, and
choose a batch of 16 rows on any number of processes where neither `MICRO_BATCH_SIZE` nor
`GRAD_ACCUM_STEPS` is set in the environment or by a flag.

An unknown flag, a wrong value or a contradiction ends with one line, `error: ...`, and exit code 2,
before anything is imported. A model that the script cannot train is refused before data is read.
Anything else that cannot work is refused before step 1.
"""


def page() -> str:
    launchers, scripts = {}, {}  # launcher's name -> its settings; training scripts, in order
    for launcher in sorted(ROOT.glob("*/launch_*.sh")):
        script, settings = read_launcher(launcher)
        launchers[launcher.stem.removeprefix("launch_")] = settings
        scripts[script] = None
    groups, users = {}, {}  # title -> group, its scripts
    for script in scripts:
        for group in groups_of(script.parent):
            groups[group.__doc__] = group
            users.setdefault(group.__doc__, []).append(str(script.relative_to(ROOT)))
    sections = [(group.__doc__, group) for group in SHARED]
    sections += [(f"{name} ({listed(users[name])})", group) for name, group in groups.items()]
    files = [str(script.relative_to(ROOT).with_name("flags.py")) for script in scripts]
    text = TOP.format(
        files=listed(["llm_demo/flags/args.py", *files]),
        settings=listed(dict.fromkeys(name for block in launchers.values() for name in block)),
        bundled=listed(BUNDLED.values()),
        first_run=listed(f"{name}={value}" for name, value in FIRST_RUN.items()),
    )
    for title, group in sections:
        text += f"\n## {title}\n| flag | default | launcher | environment | meaning |\n"
        text += "|---|---|---|---|---|\n"
        for field in dataclasses.fields(group):
            text += f"| {' | '.join(row(field, launchers))} |\n"
    return text


def row(field: dataclasses.Field, launchers: dict[str, dict[str, str]]) -> list[str]:
    """The cells of a flag. The launcher cell has its value there, if that is not the default."""
    names = [field.name, f"no_{field.name}"] if kind_of(field) is bool else [field.name]
    default = "" if field.default is None else flag_text(field.default)
    env = env_of(field)
    values = {name: flag_text(block.get(env, "")) for name, block in launchers.items()}
    values = {name: value for name, value in values.items() if value not in ("", default)}
    if len(set(values.values())) == 1 and len(values) == len(launchers):
        launcher = f"`{next(iter(values.values()))}`"
    else:
        launcher = ", ".join(f"`{value}` ({name})" for name, value in values.items())
    meaning = field.metadata["help"].replace("<", "&lt;")
    if choices_of(field):
        meaning += f" One of {listed(choices_of(field))}."
    return [listed(f"--{name}" for name in names), code(default), launcher, code(env), meaning]


def code(text: str) -> str:
    return f"`{text}`" if text else "–"


def listed(names) -> str:
    return ", ".join(map(code, names))


if __name__ == "__main__":
    (ROOT / "docs/flags.md").write_text(page(), encoding="utf-8")
