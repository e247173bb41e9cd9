"""Flags from the fields of dataclasses, by argparse; also what the commands share of parsing.

Nothing heavy is imported, so that a launcher can check all flags before torch is imported.
"""

import argparse
import dataclasses
import difflib
import functools
import importlib.util
import os
import re
import sys
import textwrap
import typing
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.machine.files import DECODER, ROOT
from llm_demo.machine.text import number_in

# What rendering a conversation sets itself: parameters of transformers' apply_chat_template.
NOT_VARIABLES = set(
    "self kwargs messages conversation tools documents chat_template add_generation_prompt "
    "continue_final_message tokenize sanitize_control_tokens padding truncation max_length "
    "return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
TRUE = ("true", "yes", "t", "y", "1")
FALSE = ("false", "no", "f", "n", "0")
# What other code knows of a flag. args.names_of(tag) has those of all scripts with a tag.
TAGS = {
    "input": "names files or folders that a run reads; --overwrite does not delete them",
    "per_node": "may have another value on another node",
    "rows": "decides the rows of a step: it must be the same on resume",
    "resume": "a change on resume is logged",
    "evaluate": "python -m llm_demo.evaluate has it too",
    "held_out": "decides the tokens of a held-out loss",
    "card": "is in the README of an export",
    "adapter_card": "is in the README of an export of adapters",
    "quiet": "is not in a report",
}
HOW = """\
--save means --save true and --no_save means --save false; all booleans work like this. A launcher
also reads environment variables with a flag's name in capitals, and MODEL; see docs/flags.md."""


def flag(
    default,
    help: str,
    *,
    tags: str = "",
    off=None,
    positive: bool = False,
    at_least: int = 0,
    at_most: float | None = None,
    form: tuple[str, str] | None = None,
    path: bool = False,
    env: str | None = None,
    alone: str | None = None,
    also: str = "",
    saves_memory: str = "",
):
    """A dataclass field that is a flag.

    Args:
        tags: words of TAGS.
        off: the value without effect, if that is not the default. Scripts without the flag have it.
        positive, at_least, at_most: bounds of a number.
        form: (a regular expression that the text matches as a whole, what it must be in words).
        path: it names files or folders, separated by commas, in which ~ is the home folder.
        env: the environment variable that sets it, "" for none; default: its name in capitals.
        alone: what the flag means without a value.
        also: its names in other trainers, unless they are spelt alike.
        saves_memory: the value to suggest after running out of GPU memory, then a remark, if any.
    """
    metadata = {
        "help": help,
        "tags": tags.split(),
        "off": default if off is None else off,
        "positive": positive,
        "at_least": at_least,
        "at_most": at_most,
        "form": form,
        "path": path,
        "env": env,
        "alone": alone,
        "also": also.split(),
        "saves_memory": saves_memory,
    }
    unknown = set(metadata["tags"]) - TAGS.keys()
    assert not unknown, unknown
    return dataclasses.field(default=default, metadata=metadata)


def kind_of(field: dataclasses.Field) -> type:
    """bool, int, float or str."""
    first = next(iter(typing.get_args(field.type)), field.type)  # of X | None, or a choice
    return first if isinstance(first, type) else str


def choices_of(field: dataclasses.Field) -> tuple[str, ...]:
    literal = typing.get_origin(field.type) is typing.Literal
    return typing.get_args(field.type) if literal else ()


def literals(group: type, name: str) -> tuple[str, ...]:
    """The values that a flag of this dataclass can take."""
    return choices_of(group.__dataclass_fields__[name])


def env_of(field: dataclasses.Field) -> str:
    """The environment variable that sets a flag through a launcher; "" if there is none."""
    env = field.metadata["env"]
    return field.name.upper() if env is None else env


def value_of(field: dataclasses.Field, text: str):
    """What `text` means as the value of a flag. Raises UserError if it is not allowed."""
    try:
        return meaning(field, text)
    except ValueError as e:
        raise UserError(f"--{field.name} {text[:80]}: {e}") from None


def meaning(field: dataclasses.Field, text: str):
    """As value_of, but raises ValueError, which says what the text must be."""
    kind, rules = kind_of(field), field.metadata
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError("must be true or false")
        return text.lower() in TRUE
    value = text
    if kind is not str:
        value = number_in(text, kind, rules["at_least"], rules["at_most"], rules["positive"])
    if rules["form"]:
        pattern, words = rules["form"]
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"must be {words}")
    allowed = choices_of(field)
    if allowed and value not in allowed:
        raise ValueError(f"choose from {', '.join(allowed)}")
    if rules["path"]:
        return ",".join(local(part, f"--{field.name} ") for part in text.split(","))
    return value


class PlainParser(argparse.ArgumentParser):
    """Dashes may replace underscores in the name of a flag."""

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        for word in words:
            refuse_other_text(word)
            if re.fullmatch("--?[^=]+=--", word):  # argparse before 3.13 drops this value
                raise UserError(f"{word}: -- is no value: set one behind =")
        words = [re.sub("^--[^=]+", underscored, word) for word in words]
        return super().parse_known_args(words, namespace)

    def error(self, message):  # argparse would print its usage first, which is long
        raise UserError(f"{message} (see --help)")


def underscored(name: re.Match) -> str:
    return f"--{name[0][2:].replace('-', '_')}"


def refuse_other_text(word: str) -> None:
    """Raise UserError for a word of the command line that is not UTF-8: tokenizers and safetensors
    open only paths that are."""
    try:
        os.fsencode(word).decode("utf-8")
    except UnicodeError:
        raise UserError(f"{ascii(word)[:80]} is not UTF-8: give it another name") from None


class FlagHelp(argparse.RawDescriptionHelpFormatter):
    """Names each flag once, without the placeholder that argparse adds."""

    def _format_action(self, action):
        name = f"--[no_]{action.dest}" if action.const is True else f"--{action.dest}"
        text = f"  {name:<18}  {self._expand_help(action)}"
        return f"{textwrap.fill(text, 100, subsequent_indent=' ' * 22)}\n"


def parser_of(description: str, groups: list[type], values: dict) -> PlainParser:
    """A parser of the flags in dataclasses. values: those that --help shows beside defaults."""
    parser = PlainParser(
        description=description,
        epilog=HOW,
        usage=argparse.SUPPRESS,
        formatter_class=FlagHelp,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    for group in groups:
        section = parser.add_argument_group(group.__doc__)
        for field in dataclasses.fields(group):
            value = values.get(field.name, field.default)
            add_flag(section, field, f"{field.metadata['help']} {remarks(field, value)}")
    for dtype in ("bf16", "fp16"):
        parser.add_argument(
            f"--{dtype}", action="store_const", const=dtype, dest="dtype", help=argparse.SUPPRESS
        )
    return parser


def add_flag(parser, field: dataclasses.Field, help: str) -> None:
    """Add a flag to a parser or its section. A boolean is --x, --x true, --no_x or --x false."""
    boolean = kind_of(field) is bool
    alone = True if boolean else field.metadata["alone"]
    optional = {"nargs": "?", "const": alone} if alone else {}
    parser.add_argument(
        f"--{field.name}",
        type=functools.partial(value_of, field),
        default=field.default,
        help=help.replace("%", "%%"),
        **optional,
    )
    if boolean:
        parser.add_argument(
            f"--no_{field.name}",
            action="store_false",
            dest=field.name,
            default=field.default,
            help=argparse.SUPPRESS,
        )


def remarks(field: dataclasses.Field, value) -> str:
    """The choices, the default, and the value if it is another one."""
    parts = [" | ".join(choices_of(field))]
    if field.default not in (None, ""):
        parts.append(f"default: {flag_text(field.default)}")
    if value != field.default:
        parts.append(f"here: {flag_text(value)}")
    return f"[{'; '.join(filter(None, parts))}]" if any(parts) else ""


def flag_text(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).removeprefix(f"{ROOT}/")


def refuse_unknown(word: str, groups: list[type]) -> typing.NoReturn:
    """Raise UserError for a word of the command line that is no flag of these groups, with the
    flag that is probably meant: the same in other trainers, one spelt much like it, or the first
    that begins with these words."""
    name = word.split("=")[0].lstrip("-")
    scripts = [folder for folder, fields in own_fields().items() if name in fields]
    if scripts:
        raise UserError(f"{word}: only for {' and '.join(scripts)}")
    meant = {"help": "help"}  # a spelling -> the flag
    for flag, field in fields_of(groups).items():
        for spelling in (flag, *field.metadata["also"]):
            meant[spelling] = flag
        if kind_of(field) is bool:
            meant[f"no_{flag}"] = f"no_{flag}"
    near = difflib.get_close_matches(name, meant, 1)  # itself, if it is among them
    near += [spelling for spelling in meant if spelling.startswith(f"{name}_")]
    hint = "see --help"
    if near and word.startswith("--"):
        hint = f"did you mean --{meant[near[0]]}?"
    raise UserError(f"unknown argument {word}; {hint}")


def fields_of(groups) -> dict[str, dataclasses.Field]:
    """The flags of dataclasses, by name."""
    return {field.name: field for group in groups for field in dataclasses.fields(group)}


@functools.cache
def groups_of(folder: Path) -> tuple[type, ...]:
    """GROUPS in the flags.py of a script's folder: the dataclasses of its own flags. The script
    itself is not imported, because that takes seconds."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_flags", folder / "flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GROUPS


@functools.cache
def own_fields() -> dict[str, dict[str, dataclasses.Field]]:
    """The flags of each script's own, by its folder, as in "fsdp/", and by name."""
    folders = [file.parent for file in sorted(ROOT.glob("*/flags.py"))]
    return {f"{folder.name}/": fields_of(groups_of(folder)) for folder in folders}


# ---------------------------------------------------------------- types for argparse


def numeral(text: str, **bounds) -> float:
    """A number, see text.number_in."""
    try:
        return number_in(text, **bounds)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text[:80]}: {e}") from None


def whole(at_least: int = 0, at_most: int | None = None):
    """A type for argparse: a whole number between these."""
    return functools.partial(numeral, kind=int, at_least=at_least, at_most=at_most)


def size(text: str) -> str:
    """A number of bytes with its unit."""
    if not re.fullmatch(r"(?=.*[1-9])\d{1,6}(\.\d{1,6})? ?[KMGT]B", text, re.I | re.ASCII):
        raise argparse.ArgumentTypeError(f"{text[:80]}: must be a size such as 500MB or 5GB")
    return text


def local(text: str, flag: str = "") -> str:
    """A path, in which ~ is the home folder. Raises UserError for an address such as gs://x, which
    would otherwise be a folder named "gs:". flag: what it is the value of, with a space."""
    scheme = re.match(r"\s*(\w[\w+.-]*:/)/", text)
    if scheme:
        raise UserError(
            f"{flag}{text[:80]}: {scheme[1]}/ is not supported: name a path on this machine, such "
            "as a mounted folder; models and datasets on the hub are named by id, as in you/name"
        )
    # a command that gets it from us would take -x for a flag
    return f"./{text}" if text.startswith("-") else os.path.expanduser(text)


def path_of(text: str) -> Path:
    """A path, in which ~ is the home folder. Raises UserError for an address."""
    return Path(local(text))


def regex(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text}: not a regular expression ({e})") from None
    return text


def template_variables(value, where: str) -> dict:
    """Variables for a chat template, from a JSON object or its text; {} if there are none. null is
    the same as no key. where: the flag or key that holds them. Raises UserError."""
    if isinstance(value, str) and value.strip():
        try:
            value = DECODER.decode(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} {value[:80]}: no JSON object: {error}") from None
    if not isinstance(value or {}, dict):
        raise UserError(f'{where} must be a JSON object, such as {{"enable_thinking": false}}')
    for name in value or {}:
        if not name.isidentifier() or name in NOT_VARIABLES or name.endswith("_token"):
            raise UserError(f"{where}: {name[:80]!r} is no variable that can be set here")
    return {name: content for name, content in (value or {}).items() if content is not None}
