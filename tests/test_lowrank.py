"""PowerSGD: the paper's numbers, whatever the number of replicas. In fp64, because power iteration
amplifies the rounding of fp32."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, torchrun
from lowrank_worker import SHAPES, R, gradient

from fsdp import powersgd as lowrank
from llm_demo.core.optim import ERROR, FACTOR

STEPS = 12
CASES = {
    "plain": {"steps": STEPS},
    "half": {"steps": STEPS // 2},
    "late": {"steps": STEPS, "start": 4},
    "thin": {"steps": 3, "thin": True},
    "zero": {"steps": 3, "zero": 3},
    "zero_first": {"steps": STEPS, "zero": 1},
    "bad": {"steps": 5, "bad": 2, "where": "a"},
    "bad_bias": {"steps": 5, "bad": 2, "where": "bias"},
    "without": {"steps": 5, "without": 2},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(case, processes): what each rank got}."""
    folder = tmp_path_factory.mktemp("lowrank")
    ranks_of = {}
    for processes in (2, 1, 3):
        cases = [{**case, "out": str(folder / f"{k}{processes}")} for k, case in CASES.items()]
        if processes != 3:  # from the checkpoint of two replicas
            rest = {"first": STEPS // 2, "steps": STEPS, "load": str(folder / "half2.0")}
            cases.append({**rest, "out": str(folder / f"resumed{processes}")})
            for dead in (0, 1):  # columns of a factor from here on
                out = str(folder / f"dead_from_{dead}_{processes}")
                cases.append({**rest, "dead": dead, "out": out})
        (folder / "cases.json").write_text(json.dumps(cases))
        torchrun(processes, ROOT / "tests/lowrank_worker.py", folder / "cases.json", 1)
        for case in cases:
            name = case["out"].rsplit("/", 1)[1][:-1]
            ranks = [torch.load(f"{case['out']}.{r}") for r in range(processes)]
            ranks_of[name, processes] = ranks
    return ranks_of


def off(a, b):
    """The largest relative difference of two lists of steps."""
    return max(
        float((x - y).norm() / (y.norm() + 1e-30))
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def textbook(steps, begin=0, shards=(0, 1), state=False):
    """The paper's algorithm 1 and 2 for one matrix each, in one process, with QR. shards: (which
    shard's rows, of how many). state: yield (sums, errors, factors)."""
    which, shards = shards
    errors = {name: 0 for name in ("a", "b", "wide")}
    factors = {n: lowrank._random_factor(SHAPES[n][1], R, n).double() for n in ("a", "b", "wide")}
    for step in range(begin, steps):
        sums = []
        for name in SHAPES:
            total = gradient(name, step).chunk(shards)[which]
            if name in factors:
                matrix = total + errors[name]
                left = torch.linalg.qr(matrix @ factors[name])[0]
                factors[name] = matrix.T @ left
                total = left @ factors[name].T
                errors[name] = matrix - total
            sums.append(total)
        yield (sums, dict(errors), dict(factors)) if state else sums


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_it_is_the_papers_algorithm(results, processes):
    for rank in results["plain", processes]:
        assert off(rank["sums"], list(textbook(STEPS))) < 1e-8


def test_replicas_get_the_same_bits(results):
    for name in CASES:
        for processes in (2, 3):
            first, *others = results[name, processes]
            for other in others:
                for a, b in zip(first["sums"], other["sums"], strict=True):
                    pairs = zip(a, b, strict=True)
                    assert all(x.nan_to_num().equal(y.nan_to_num()) for x, y in pairs)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_continues_with_any_number_of_replicas(results, processes):
    resumed, whole = results["resumed", processes][0], results["plain", 2][0]
    assert off(resumed["sums"], whole["sums"][STEPS // 2 :]) < 1e-8


def test_exact_before_it_starts_and_for_gradients_of_its_rank(results):
    late = results["late", 2][0]["sums"]
    exact = [[gradient(name, step) for name in SHAPES] for step in range(STEPS)]
    assert off(late[:4], exact[:4]) < 1e-14 and off(late[4:], exact[4:]) > 0.1
    a = list(SHAPES).index("a")
    thin = results["thin", 2][0]["sums"]
    one = [[step[a]] for step in results["thin", 1][0]["sums"]]
    assert off([[step[a]] for step in thin], one) < 1e-8
    for step, (sums,) in enumerate(one):
        u, s, v = torch.linalg.svd(gradient("a", step), full_matrices=False)
        if step == 0:  # later steps add what the error holds: nothing
            assert off([[sums]], [[u[:, :R] * s[:R] @ v[:R]]]) < 1e-8


def test_a_zero_gradient_stays_zero(results):
    b = list(SHAPES).index("b")
    assert all((step[b] == 0).all() for step in results["zero", 2][0]["sums"])


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_matrix_without_a_gradient_at_first_starts_later(results, processes):
    """As if its first step were the next one."""
    b = list(SHAPES).index("b")
    first, *later = ([step[b]] for step in results["zero_first", processes][0]["sums"])
    assert not first[0].any()
    assert off(later, [[step[b]] for step in textbook(STEPS, begin=1)]) < 1e-8


def left_out(steps):
    """The share of the last six steps' gradients of b that was not sent in them."""
    b = list(SHAPES).index("b")
    true = sum(gradient("b", step) for step in range(STEPS - 6, STEPS))
    return float((sum(step[b] for step in steps[-6:]) - true).norm() / true.norm())


def test_columns_that_are_zero_start_anew(results):
    """All of a factor or some: as much is sent as otherwise."""
    plain = left_out(results["plain", 2][0]["sums"])
    assert plain < 0.75
    for name in ("dead_from_0_", "dead_from_1_"):
        assert left_out(results[name, 2][0]["sums"]) < 1.1 * plain, name


@pytest.mark.parametrize("bad", ["bad", "bad_bias"])
def test_an_infinite_gradient_spoils_its_step_only(results, bad):
    """In a matrix or in what is not compressed, on one replica: on all. Afterwards errors are those
    of the step before."""
    steps = results[bad, 2][0]["sums"]
    finite = [all(t.isfinite().all() for t in step) for step in steps]
    assert finite == [True, True, False, True, True]
    without = results["without", 2][0]["sums"]
    assert off(steps[:2] + steps[3:], without) == 0


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """{case: what each of four ranks got}: two replicas, each in two shards."""
    folder = tmp_path_factory.mktemp("sharded")
    names = "plain", "bad", "bad_bias", "without"
    cases = [{**CASES[name], "out": str(folder / name)} for name in names]
    (folder / "cases.json").write_text(json.dumps(cases))
    torchrun(4, ROOT / "tests/lowrank_worker.py", folder / "cases.json", 2)
    return {name: [torch.load(folder / f"{name}.{rank}") for rank in range(4)] for name in names}


def test_each_shard_is_a_matrix_of_its_own(sharded):
    """Of which the state has all: errors in their places, each shard's factor after the last."""
    state = sharded["plain"][0]["state"]
    for shard in (0, 1):
        steps = list(textbook(STEPS, shards=(shard, 2), state=True))
        *_, (_, errors, factors) = steps
        for replica in (0, 1):
            found = sharded["plain"][2 * replica + shard]["sums"]
            assert off(found, [sums for sums, *_ in steps]) < 1e-8
        for name, error in errors.items():
            assert off([[state[f"{name}.{ERROR}"].chunk(2)[shard]]], [[error]]) < 1e-8
            # the same space: a basis depends on how it is made orthonormal
            pair = state[f"{name}.{FACTOR}"].chunk(2)[shard], factors[name]
            mine, true = (torch.linalg.qr(factor)[0] for factor in pair)
            assert off([[mine @ mine.T]], [[true @ true.T]]) < 1e-7


@pytest.mark.parametrize("bad", ["bad", "bad_bias"])
def test_an_infinite_gradient_of_one_shard_spoils_the_step_of_all(sharded, bad):
    """Nothing of that step goes into the errors and factors of the other shard."""
    for rank, without in enumerate(sharded["without"]):
        steps = sharded[bad][rank]["sums"]
        assert off(steps[:2] + steps[3:], without["sums"]) == 0, rank


def test_small_matrices_and_vectors_are_sent_whole(results):
    for step, sums in enumerate(results["plain", 2][0]["sums"]):
        for name in ("bias", "small"):
            exact = gradient(name, step)
            assert torch.allclose(sums[list(SHAPES).index(name)], exact, rtol=1e-14)
    says = results["plain", 2][0]["says"]
    thin, whole = 2 * R * (40 + 30) + R * (24 + 64), 30 + 20
    share = (thin + whole) / (2 * 1200 + 24 * 64 + 50)
    assert says == f"PowerSGD from step 1 on: {share:.1%} of the gradients' bytes are sent"
    nothing = lowrank.LowRank.describe(SimpleNamespace(groups=[]))
    assert nothing.startswith("warning: PowerSGD compresses nothing: ")
