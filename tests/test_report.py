"""The page of runs: its charts show the numbers of the files, and nothing in a file breaks it."""

import html
import json
import os
import random
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from conftest import refused, run

from llm_demo import report
from llm_demo.run import records
from llm_demo.run.folder import step_parts

SVG = "{http://www.w3.org/2000/svg}"


def record(step, ranks=2, **more):
    return {
        "step": step, "train/loss": 8 / step**0.3, "train/grad_norm": 1 + 1 / step,
        "train/lr": 1e-3, "train/skipped": False, "perf/step_ms": 100.0,
        "perf/comm_ms": [30.0] * ranks, "perf/comm_exposed_ms": [20.0] * ranks,
        "perf/comm_wait_ms": [5.0] * ranks, "perf/data_ms": 0.5, "perf/toks_per_s": 1000.0 + step,
        "perf/label_toks_per_s": 600.0, "perf/slots_per_s": 1100.0, "perf/mfu": 0.4,
        "perf/peak_mem_gb": [1.5 + rank for rank in range(ranks)], "data/tokens": 100 * step,
        "data/label_tokens": 60 * step, "data/fill": 0.9, **more,
    }  # fmt: skip


def write(folder, records, config=None, env=None, ended=True):
    """A run's folder as a run leaves it."""
    folder.mkdir(parents=True)
    config = {"max_steps": 12, "dtype": "fp32", "seq_len": 256} | (config or {})
    env = {"device": "CPU, 2 cores", "world_size": 2, "revision": "abc123"} | (env or {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "env.json").write_text(json.dumps(env))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if ended:
        (folder / "summary.json").write_text(json.dumps({"steps": 12, "seconds": 125.4}))
    return folder


def make(out, *runs):
    report.main([*map(str, runs), "--out", str(out)])
    return out.read_text()


def charts(page):
    """{title: the chart's element tree}; an <svg> that is no XML fails here."""
    found = re.findall(r"<h3>([^<]*)</h3>(<svg.*?</svg>)", page, re.S)
    return {html.unescape(title): ET.fromstring(svg) for title, svg in found}


def points(svg, name):
    """The corners of a line, or of a bar, as an array of (x, y)."""
    group = next(g for g in svg.iter(f"{SVG}g") if g.get("id", "").endswith(f"-{name}"))
    path = next(group.iter(f"{SVG}path")).get("d")
    moved = [float(use.get("y")) for use in group.iter(f"{SVG}use")]
    moved = 0 if group.find(f"{SVG}path") is not None else moved[0]  # an area is drawn by a use
    return np.array(re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path), float) + [0, moved]


def assert_drawn(found, expected):
    """Equal up to the scale of the axis."""
    slope, offset = np.polyfit(expected, found, 1)
    assert found == pytest.approx(slope * np.array(expected) + offset, abs=1e-3)
    assert abs(slope) > 0


NOISE = {"lr_scheduler": "cosine", "output_dir": "x", "seed": 1, "global_batch": 8, "export": "hf",
         "parallelism": "FSDP2"}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    evals = [{"step": s, "eval/loss": 9 - s / 4, "eval/exact": s / 16} for s in (0, 6, 12)]
    unused = {"psgd_rank": 0, "schedule_free": False}  # of one script, so no difference
    records = [*map(record, range(1, 13)), *evals]
    fsdp = write(folder / "fsdp", records, {"lr": 1e-3, **NOISE, **unused})
    slower = {"perf/step_ms": 150.0, "perf/comm_exposed_ms": [30.0, 40.0]}
    slower = [slower | {"data/label_tokens": 90 * s} for s in range(1, 13)]
    pipe = [record(s, **more, **{"train/loss": 7 / s**0.2}) for s, more in enumerate(slower, 1)]
    pipe[4] |= {"train/grad_norm": None, "train/skipped": True}
    other = {"lr_scheduler": "cosine", "stages": 2, "lr": 2e-3, "schedule": "1f1b", "seed": 2}
    pp = write(folder / "pp", pipe, other | {"parallelism": "pipeline of 2"})
    return fsdp, pp, make(folder / "two.html", fsdp, pp)


def test_lines_are_the_numbers_of_the_files(two):
    fsdp, pp, page = two
    drawn = charts(page)
    assert len(drawn) == 4
    steps = list(range(1, 13))
    both = [8 / s**0.3 for s in steps] + [7 / s**0.2 for s in steps]
    a, b = (points(drawn["Loss"], f"{name}-loss") for name in "AB")
    heldout = points(drawn["Loss"], "A-heldout")
    # all lines share the axes: where one is twice as far, it is drawn so
    assert_drawn(np.concatenate([a, b, heldout])[:, 0], [*steps, *steps, 0, 6, 12])
    assert_drawn(np.concatenate([a, b, heldout])[:, 1], [*both, 9, 7.5, 6])
    assert_drawn(points(drawn["Tokens per second"], "A-speed")[:, 1], steps)
    norms = points(drawn["Gradient norm"], "B-norm")
    assert_drawn(norms[:, 1], [1 + 1 / s for s in steps if s != 5])


def test_bars_are_the_numbers_of_the_files(two):
    chart = charts(two[2])["Where a step's time goes"]

    def width(name):
        corners = points(chart, name)[:, 0]
        return corners.max() - corners.min()

    parts = {"A-0": (80, 15, 5), "B-0": (120, 25, 5), "B-1": (110, 35, 5)}
    unit = width("A-0-compute") / 80
    for name, expected in parts.items():
        widths = [width(f"{name}-{part}") for part in report.PARTS_OF_A_STEP]
        assert widths == pytest.approx(np.array(expected) * unit, abs=1e-3)
    said = [t.text for t in chart.iter(f"{SVG}text")]
    assert {"80", "15", "120", "25", "110", "35", "A rank 0", "B rank 1"} <= set(said)
    assert {name for name, _ in report.PARTS_OF_A_STEP.values()} <= set(said)


def rows_of(part):
    """{first cell: the others} of the first table in a part of the page."""
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', part.split("</table>")[0])
    return {name: re.findall("<td>(.*?)</td>", cells) for name, cells in rows}


def test_the_table_of_runs_and_the_settings_that_differ(two):
    page = two[2]
    rows = rows_of(page)
    for name, said in {
        "status": ["finished, 12 steps"] * 2, "held-out loss": ["6.0000", "–"],
        "best held-out loss": ["6.0000", "–"],
        "held-out answers exact": ["0.0% → 75.0%", "–"], "notes": ["–", "–"],
        "tokens per second": ["1.01k", "1.01k (1.00 x A)"], "peak memory": ["1.5 / 2.5 GiB"] * 2,
        "step": ["100.0 ms", "150.0 ms"], "MFU": ["40 %"] * 2, "duration": ["0:02:05"] * 2,
        "seen": ["1.2k tokens, 720 learnt", "1.2k tokens, 1.08k learnt"],
        "skipped": ["0 of 12 logged steps", "1 of 12 logged steps"],
        "learning rate": ["0.001, cosine", "0.002, cosine"],
        "parallelism": ["FSDP2", "pipeline of 2"], "device": ["2 × CPU, 2 cores"] * 2,
        "commit": ["abc123"] * 2,
    }.items():  # fmt: skip
        assert rows[name] == said, name
    differ = page.split("Settings that differ</h2>")[1]
    assert rows_of(differ) == {
        "lr": ["0.001", "0.002"], "stages": ['<span class="absent">absent</span>', "2"],
        "schedule": ['<span class="absent">absent</span>', "1f1b"],
    }  # fmt: skip
    assert "Not compared: " in differ and "output_<wbr>dir" in differ
    for part, names in ((page, [f"{folder}</span>" for folder in two[:2]]), (differ, ["", ""])):
        heads = re.findall("<th>(.*?)</th>", part.split("</tr>")[0])[1:]
        for head, letter, color, name in zip(heads, "AB", report.COLORS, names, strict=False):
            assert f'style="background: {color}">{letter}</b>' in head and name in head


def test_held_out_losses_of_other_data_say_so(tmp_path):
    evals = [record(1), {"step": 1, "eval/loss": 4.0}]
    a = write(tmp_path / "a", evals)
    for key, other in (("eval_json", True), ("model_name_or_path", True), ("max_steps", False)):
        b = write(tmp_path / key, evals, {key: "other"} if other else {key: 13})
        rows = rows_of(make(tmp_path / "page.html", a, b))
        said = "4.0000 (of other data or tokens than A&#39;s)" if other else "4.0000"
        assert rows["held-out loss"] == ["4.0000", said]


def test_a_number_that_is_absent_is_a_dash(tmp_path):
    a = write(tmp_path / "a", [record(1), {"step": 1, "eval/loss": 4.0, "eval/exact": 0.5}])
    b = write(tmp_path / "b", [record(1, **{"perf/mfu": None})], {"eval_json": "none"})
    c = write(tmp_path / "c", [], {"eval_json": "none"}, ended=False)
    rows = rows_of(make(tmp_path / "page.html", a, b, c))
    for name in ("held-out loss", "best held-out loss", "held-out answers exact", "MFU"):
        assert rows[name][1:] == ["–", "–"], name
    for name in ("training loss", "tokens per second", "step", "peak memory", "seen", "duration"):
        assert rows[name][2] == "–", name
    assert all(cell for cells in rows.values() for cell in cells)


def test_the_page_needs_nothing_but_itself(two):
    page = two[2]
    addresses = set(re.findall(r"\w+://[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<script|<link|<img|<iframe|@import|\son\w+=", page)
    assert "default-src 'none'" in page
    ids = re.findall(r'\sid="(.*?)"', page)
    assert len(ids) == len(set(ids))
    assert {name for name in re.findall(r"(?:url\(|href=\")#([\w-]+)", page)} <= set(ids)
    assert all(svg.get("aria-label") == title for title, svg in charts(page).items())
    defined = set(re.findall(r"--([\w]+):", page))
    assert set(re.findall(r"var\(--(\w+)\)", page)) <= defined


def test_waiting_behind_compute_counts_as_exposed_only_where_it_fits():
    def parts(**more):
        run = report.SimpleNamespace(steps=[record(s, **more) for s in range(1, 6)], config={})
        return step_parts(run)

    for exposed, wait in ((20, 5), (20, 25), (0, 5), (120, 3)):
        keys = {"perf/comm_exposed_ms": [exposed] * 2, "perf/comm_wait_ms": [wait] * 2}
        for rank in parts(**keys):
            assert sum(rank[part] for part in report.PARTS_OF_A_STEP) == rank["step"] == 100
            assert rank["waiting"] == min(exposed, wait)
            assert min(rank.values()) >= 0
    untimed = {"perf/comm_exposed_ms": None, "perf/comm_wait_ms": None}  # as a run writes it
    assert parts(**untimed) == parts(**{"perf/comm_exposed_ms": None}) == []
    # the first steps are slow; then the run went on with three ranks
    steps = [record(s, ranks=2, **{"perf/step_ms": 1e6}) for s in (1, 2)] + [record(3)]
    steps += [record(s, ranks=3) for s in (4, 5)]
    ranks = step_parts(report.SimpleNamespace(steps=steps, config={}))
    assert len(ranks) == 3 and ranks[0]["step"] == 100
    assert report.WARMUP == records.WARMUP


def test_a_run_that_is_going_on_and_one_killed_in_the_middle_of_a_line(tmp_path):
    live = write(tmp_path / "live", map(record, range(1, 8)), ended=False)
    whole = (live / "metrics.jsonl").read_bytes()
    (found,) = report.read_runs([live])
    assert report.status(found) == "running or interrupted at step 7 of 12"
    last = len(whole) - whole[:-1].rindex(b"\n") - 2
    for cut in (1, last // 2):  # a line may end anywhere
        (live / "metrics.jsonl").write_bytes(whole[:-cut])
        (found,) = report.read_runs([live])
        torn = cut > 1
        assert found.broken == torn
        assert report.status(found) == f"running or interrupted at step {7 - torn} of 12"
    page = make(tmp_path / "live.html", live)
    assert "running or interrupted at step 6 of 12" in page and "1 unreadable line" in page
    assert len(points(charts(page)["Loss"], "A-loss")) == 6
    # longer than its summary says: resumed with more steps
    (live / "summary.json").write_text('{"steps": 5}')
    (found,) = report.read_runs([live])
    assert report.status(found).startswith("running or interrupted")


def test_a_run_without_a_step_yet(tmp_path, two):
    new = write(tmp_path / "new", [{"step": 0, "eval/loss": 8.5}], ended=False)
    page = make(tmp_path / "new.html", new)
    assert "No step is logged yet" in page and "no step logged yet" in page and "8.5000" in page
    (new / "metrics.jsonl").unlink()
    assert "No step is logged yet" in make(tmp_path / "new.html", new)  # replaced
    page = make(tmp_path / "new.html", two[0], new)
    assert "no step logged yet" in page and len(charts(page)) == 4


def test_numbers_that_are_missing_or_not_finite(tmp_path):
    untimed = {"perf/comm_exposed_ms": None, "perf/comm_wait_ms": None, "perf/toks_per_s": None}
    old = [record(step, **untimed) for step in range(1, 6)]
    old[2]["train/loss"] = None
    page = make(tmp_path / "old.html", write(tmp_path / "old", old))
    drawn = charts(page)
    assert drawn.keys() == {"Loss", "Gradient norm"}
    assert page.count("Not recorded in these runs") == 2
    assert len(points(drawn["Loss"], "A-loss")) == 4
    bad = [record(s, **{"train/loss": None, "train/grad_norm": None, "train/skipped": True,
                        "perf/step_ms": None}) for s in range(1, 5)]  # fmt: skip
    rows = rows_of(make(tmp_path / "bad.html", write(tmp_path / "bad", bad)))
    assert rows["training loss"] == ["not finite"] and rows["skipped"] == ["4 of 4 logged steps"]


EVIL = "</td></title></style><script>document.title='x'</script><img src=x onerror=alert(1)>\"'&$a$"


def test_what_files_say_is_text(tmp_path):
    name = "<script>alert(1)<|script> & $x^{$ 'a' \"b\" ünï"
    config = {"model_name_or_path": EVIL, "train_json": EVIL, "dtype": EVIL, EVIL: EVIL,
              "log_every": EVIL, "stages": EVIL, "data_parallel": EVIL,
              "micro_batch_size": {EVIL: [EVIL]}}  # fmt: skip
    env = {"device": EVIL, "revision": EVIL, "versions": {EVIL: EVIL}, "world_size": EVIL}
    steps = [record(s, **{EVIL: EVIL, "train/lr": EVIL}) for s in range(1, 5)]
    runs = [write(tmp_path / sub / name, steps, config | {"sub": sub}, env) for sub in "ab"]
    page = make(tmp_path / "evil.html", *runs)
    assert not re.search(r"<(script|img|iframe|object|link)", page)
    assert html.escape(EVIL, quote=False) in page.replace("&#39;", "'").replace("&#34;", '"')
    assert "a/&lt;script&gt;alert(1)&lt;|script&gt;" in page and len(charts(page)) == 4


def test_a_long_run_is_a_small_page(tmp_path):
    rng = random.Random(0)
    records = []
    for step in range(1, 30_001):
        loss, speed = 2 + 6 / step**0.3 + rng.gauss(0, 0.2), rng.gauss(1000, 50)
        records.append(record(step, **{"train/loss": loss, "perf/toks_per_s": speed}))
    records[18_555]["train/loss"] = 13.0
    records += [{"step": s, "eval/loss": 8 - s / 6e3} for s in range(0, 30_001, 100)]
    long = write(tmp_path / "long", records, {"max_steps": 30_000})
    out = tmp_path / "long.html"
    drawn = charts(make(out, long))
    chart = drawn["Loss"]
    assert out.stat().st_size < 600_000
    band = points(chart, "A-loss-range")
    top = band[band[:, 1].argmin()]  # the spike is there, in its place
    line = points(chart, "A-loss")
    first, last = line[0, 0], line[-1, 0]
    assert (top[0] - first) / (last - first) == pytest.approx(0.618, abs=5e-3)
    # the median is smooth, and where the loss is
    assert 100 < len(line) <= report.POINTS_OF_A_LINE
    heldout = points(chart, "A-heldout")  # falls from 8 to 3
    scale = 5 / (heldout[-1, 1] - heldout[0, 1])
    losses = 8 - (line[:, 1] - heldout[0, 1]) * scale
    assert losses.max() < 9 and top[1] < line[:, 1].min()
    assert losses[-1] == pytest.approx(2 + 6 / 3e4**0.3, abs=0.05)


BAD = {  # case: (the run, the page, what is said), in a folder that has good/ and these
    "no run": ("empty", "page.html", "is not a run's folder"),
    "a model": ("hf", "page.html", "is not a run's folder"),
    "a broken file": ("broken", "page.html", "broken/config.json: "),
    "a pipe": ("piped", "page.html", "metrics.jsonl is not a regular file"),
    "out is a folder": ("good", "empty", "Is a directory"),
    "out is a pipe": ("good", "piped/metrics.jsonl", "metrics.jsonl is not a regular file"),
    "out has no folder": ("good", "a/b.html", "b.html: No such file or directory"),
    "out is no report": ("good", "good/metrics.jsonl", "is not a report: choose another"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(case, tmp_path, record_property):
    record_property("bad inputs", 1)
    good = write(tmp_path / "good", map(record, range(1, 4)))
    piped = write(tmp_path / "piped", [])
    (piped / "metrics.jsonl").unlink()
    os.mkfifo(piped / "metrics.jsonl")  # who opens it waits without end
    (tmp_path / "empty").mkdir()
    broken = write(tmp_path / "broken", [])
    (broken / "config.json").write_text('{"max_st')
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "qwen3"}')
    before = (good / "metrics.jsonl").read_text()
    run, out, said = BAD[case]
    with refused(said):
        make(tmp_path / out, tmp_path / run)
    assert not (tmp_path / "page.html").exists()
    assert (good / "metrics.jsonl").read_text() == before


def test_the_command(two, tmp_path):
    """One line for an error; a page in the current folder by default; no PyTorch to wait for, none
    of a user's matplotlib settings, nothing new in the run."""
    before = sorted(two[0].iterdir())
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    code = "import sys; from llm_demo import report; report.main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules"
    done = run([sys.executable, "-c", code, two[0]], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "report: report.html\n"
    assert "<h3>Loss</h3>" in (tmp_path / "report.html").read_text()
    assert sorted(two[0].iterdir()) == before
    assert {p.name for p in tmp_path.iterdir()} == {"matplotlibrc", "report.html"}
    command = [sys.executable, "-m", "llm_demo.report", "nowhere", "--out", "x.html"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: nowhere is not a run's folder")
