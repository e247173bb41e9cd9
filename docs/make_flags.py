"""Write docs/flags.md, the table of all flags: python docs/make_flags.py

Flags come from llm_demo/flags/args.py and the flags.py beside each training script. The launchers'
own values come from the settings at their top. tests/test_flags.py fails when the page is stale.
"""

import dataclasses
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llm_demo.flags.args import SHARED  # noqa: E402
from llm_demo.flags.parsing import choices_of, env_of, flag_text, groups_of, kind_of  # noqa: E402
from llm_demo.launch.settings import BUNDLED, FIRST_RUN, read_launcher  # noqa: E402

TOP = """\
# Flags
Written by `python docs/make_flags.py` from the texts in {files}.

- **On the command line**: `bash fsdp/launch_fsdp.sh --lr 2e-5`. Dashes may replace underscores. \
`--save` means `--save true`, and `--no_save` means `--save false`. All flags with the default \
`true` or `false` work like this.
- **In the environment**: `LR=2e-5 bash fsdp/launch_fsdp.sh`. A launcher reads each flag's name \
in capitals, and `MODEL` for `--model_name_or_path`. The scripts themselves do not.
- **In a launcher**: edit the settings at its top. You can add others, as in `SEED=${{SEED-7}}`.

A flag overrides the environment, which overrides the launcher. An empty value leaves the choice \
to the script. `NUM_EPOCHS` replaces the launcher's `MAX_STEPS`. With the bundled model and data \
({bundled}), launchers set {first_run} and a batch of 16 rows, where you set nothing else.

An unknown flag, a wrong value or a contradiction ends with one line, `error: ...`, and exit \
code 2, before anything is imported. Whatever else cannot work is refused before step 1.
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
            users.setdefault(group.__doc__, []).append(script.parent.name)
    sections = [(group.__doc__, group) for group in SHARED]
    sections += [(f"{name} ({listed(users[name])})", group) for name, group in groups.items()]
    files = [str(script.relative_to(ROOT).with_name("flags.py")) for script in scripts]
    top = TOP.format(
        files=listed(["llm_demo/flags/args.py", *files]),
        bundled=listed(BUNDLED.values()),
        first_run=listed(f"{name}={value}" for name, value in FIRST_RUN.items()),
    )
    text = "".join(wrapped(line) + "\n" for line in top.splitlines())
    for title, group in sections:
        text += f"\n## {title}\n| flag | default | meaning |\n|---|---|---|\n"
        for field in dataclasses.fields(group):
            text += f"| {' | '.join(row(field, launchers))} |\n"
    return text


def wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 110, subsequent_indent=indent, break_on_hyphens=False)


def row(field: dataclasses.Field, launchers: dict[str, dict[str, str]]) -> list[str]:
    """The cells of a flag. The default's has the launchers' values, if they are others."""
    names = [field.name]
    if kind_of(field) is bool and field.default is None:
        names.append(f"no_{field.name}")
    default = "" if field.default is None else flag_text(field.default)
    users = {}  # value -> launchers
    for name, block in launchers.items():
        value = flag_text(block.get(env_of(field), ""))
        if value not in ("", default):
            users.setdefault(value, []).append(name)
    texts = [code(default)]
    for value, of in users.items():
        which = "launchers" if len(of) == len(launchers) else ", ".join(of)
        texts.append(f"{which}: {code(value)}")
    meaning = field.metadata["help"].replace("<", "&lt;")
    if choices_of(field):
        meaning += f" One of {listed(choices_of(field))}."
    return [listed(f"--{name}" for name in names), "; ".join(texts), meaning]


def code(text: str) -> str:
    return f"`{text}`" if text else "–"


def listed(names) -> str:
    return ", ".join(map(code, names))


if __name__ == "__main__":
    (ROOT / "docs/flags.md").write_text(page(), encoding="utf-8")
