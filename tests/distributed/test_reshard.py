"""A run goes on with other ranks, in another topology or with other buckets: what must stay does so, coordinate by
coordinate, and training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from tests.distributed.common import digest
from tests.distributed.reshard_cases import (
    AFTERWARDS,
    APART,
    CASES,
    DENSE,
    ENTRIES,
    OUTCOMES,
    SWITCHED,
    Outcome,
)
from tests.distributed.stages import FREEZE, LOCAL_STEPS
from tests.saved_states import of_one_rank

pytestmark = pytest.mark.timeout(300)  # the first test of a change waits for two runs of all cases

BETA = 0.9


def outcomes(chosen: Callable[[Outcome], bool]) -> pytest.MarkDecorator:
    """One test for each of them."""
    marks = {False: (), True: pytest.mark.long}
    params = [pytest.param(one, marks=marks[one.change.long], id=str(one)) for one in OUTCOMES if chosen(one)]
    return pytest.mark.parametrize("outcome", params)


def each(*names: str, stages: tuple[int, ...] = (DENSE, SWITCHED, APART)) -> pytest.MarkDecorator:
    """Outcomes of those optimizers, between runs that both compress."""
    return outcomes(lambda one: one.name in names and one.stage in stages and one.change.compressed)


every_outcome = outcomes(lambda one: not one.refused)


def joined(net: Mapping[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([p.reshape(-1).double().numpy() for p in net.values()])


def assert_close(ours: np.ndarray, theirs: np.ndarray, rounding: float) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=rounding, atol=rounding * np.abs(theirs).max())


def test_the_cases_are_all_optimizers_and_the_stages_what_they_are_called() -> None:
    assert {str(case.entry) for case in CASES} == set(ENTRIES)
    assert DENSE < FREEZE < SWITCHED
    assert SWITCHED not in LOCAL_STEPS
    assert {APART - 2, APART - 1, APART} <= set(LOCAL_STEPS)


@outcomes(lambda one: one.refused)
def test_a_frozen_variance_is_refused_where_nothing_is_compressed(outcome: Outcome) -> None:
    for answer in outcome.answers:
        assert isinstance(answer, str)
        assert "with a frozen variance" in answer
        assert "Use topology='flat'" in answer


# What all ranks share ------------------------------------------------------------------------------------------------

OF_A_RANK = ("sent", "answered", "sent_scale", "answer_scale", "answer_scale_before", "residual", "answer_residual")
OF_A_RANK_TOO = {
    "Birder": ("m", "b"),
    "CDAdam": ("known", "said", "mean", "average"),
    "DistributedLion": ("m", "update"),
    "SketchedAMSGrad": ("m", "error"),
}
KEPT = ("step", "updates", "variance", "variance_updates", "warmup", "coefficient", "factor", "weight", "rate")
KEPT_TOO = ("v", "w", "peak")


@every_outcome
def test_what_ranks_share_is_equal_on_all_and_as_it_was(outcome: Outcome) -> None:
    assert len(outcome.ends) == outcome.change.after.nodes * outcome.change.after.ranks, outcome.answers[0]
    before, after = outcome.before, outcome.after
    of_a_rank = {*OF_A_RANK, *OF_A_RANK_TOO.get(outcome.name, ())}
    if outcome.frozen and outcome.name != "ZeroOneAdam":
        of_a_rank.add("m")  # its memory has what was sent
    for name in after.names - of_a_rank:
        after.shared(name)
    kept = {*KEPT, *KEPT_TOO}
    if outcome.how == "average":
        kept |= {"followed", "alive", "spoke"}
    if outcome.stage != APART:
        kept |= {"m", "master", "interval"}
    for name in (kept & before.names & after.names) - of_a_rank:
        np.testing.assert_array_equal(after.shared(name), before.shared(name), err_msg=name)


@every_outcome
def test_parameters_stay_unless_replicas_differed(outcome: Outcome) -> None:
    values = [joined(taken["net"]) for taken in outcome.taken_over]
    for of_rank in values:
        np.testing.assert_array_equal(of_rank, values[0])
    replicas = [joined(saved["net"]) for saved in outcome.saved]
    differed = any(not np.array_equal(replica, replicas[0]) for replica in replicas)
    assert differed is (outcome.stage == APART and outcome.change.before.nodes > 1)
    if not differed:
        np.testing.assert_array_equal(values[0], replicas[0])


# What workers keep for themselves ------------------------------------------------------------------------------------


@outcomes(lambda one: one.name == "Birder")
def test_averages_stay_within_their_bound(outcome: Outcome) -> None:
    """|m| <= b, exactly, with one beta for both."""
    before, after = outcome.before, outcome.after
    m, b = after.of_workers("m"), after.of_workers("b")
    bounded = (np.abs(before.of_workers("m")) <= before.of_workers("b")).all()
    assert bounded == (outcome.case.options.get("beta_b", 0.95) is None)
    assert not bounded or (np.abs(m) <= b).all()
    if outcome.how == "reset":
        assert not m.any()
        assert not b.any()
        assert "alive" not in after.names or not after.bits("alive").any()
        return
    assert m.any()
    for ours, theirs in ((m, before.of_workers("m")), (b, before.of_workers("b"))):
        for worker in ours:
            np.testing.assert_allclose(worker, theirs.mean(axis=0), rtol=outcome.case.rounding, atol=1e-30)


@each("ZeroOneAdam", stages=(DENSE, SWITCHED))
def test_what_has_not_been_said_stays(outcome: Outcome) -> None:
    """mean e_i + ē, which parameters are still to hear."""
    assert_unsaid(outcome, 0.0)


@each("OneBitAdam", "OneBitLamb", stages=(SWITCHED,))
def test_what_has_not_been_said_stays_and_so_does_the_momentum(outcome: Outcome) -> None:
    """What the next answer is going to be made of, but for gradients: mean e_i + ē + β1 m."""
    momentum = BETA * outcome.before.answer()
    assert (momentum != 0).mean() > 0.6
    assert_unsaid(outcome, momentum)
    assert not outcome.after.answer().any()  # it is among the errors


def assert_unsaid(outcome: Outcome, more: np.ndarray | float) -> None:
    """All is as it was, or errors are zero; and there is more in those of workers, which are equal."""
    before, after, rounding = outcome.before, outcome.after, outcome.case.rounding
    kept = outcome.how == "average"
    unsaid = before.worker_errors().mean(axis=0) + before.owner_errors()
    assert (unsaid != 0).mean() > 0.4
    of_workers = after.worker_errors()
    assert_close(of_workers.mean(axis=0) + after.owner_errors(), more + kept * unsaid, rounding)
    assert_close(after.owner_errors(), kept * before.owner_errors(), rounding)
    assert (of_workers == of_workers[0]).all()


@outcomes(lambda one: one.case.entry.options.get("warmup_bits") is not None and not one.refused)
def test_residuals_of_a_quantised_warmup_are_averaged_at_workers_and_joined_at_owners(outcome: Outcome) -> None:
    """With several workers; a single one quantises nothing. The switch drops all residuals."""
    before, after = outcome.before, outcome.after
    for states, grid in ((before, outcome.change.before), (after, outcome.change.after)):
        assert ("residual" in states.names) == ("answer_residual" in states.names) == (grid.nodes > 1)
    if "residual" not in before.names & after.names:
        return
    workers, owners = before.of_workers("residual"), before.of_owners("answer_residual")
    assert workers.any() == owners.any() == (outcome.stage == DENSE)
    kept = outcome.how == "average"
    for worker in after.of_workers("residual"):
        assert_close(worker, kept * workers.mean(axis=0), outcome.case.rounding)
    np.testing.assert_array_equal(after.of_owners("answer_residual"), kept * owners)


@each("CDAdam")
def test_what_is_known_of_workers_is_their_mean(outcome: Outcome) -> None:
    before, after = outcome.before, outcome.after
    kept = outcome.how == "average"
    mean = after.of_owners("mean")
    for known in after.of_workers("known"):
        np.testing.assert_array_equal(known, mean)
    assert before.of_owners("mean").any()
    np.testing.assert_array_equal(mean, kept * before.of_owners("mean"))
    assert kept or not after.shared("followed").any()
    if "average" in after.names:
        for average in after.of_workers("average"):
            assert_close(average, kept * before.of_workers("average").mean(axis=0), outcome.case.rounding)
    for state in after.states:
        # Nothing has been said beyond what is known.
        assert not any(of.get("sent_scale", torch.zeros(1)).any() for of in of_one_rank(state)["state"].values())


@outcomes(lambda one: one.name == "SketchedAMSGrad")
def test_momenta_and_errors_of_sketches_are_averaged(outcome: Outcome) -> None:
    kept = outcome.how == "average"
    for name in ("m", "error"):
        mean = outcome.before.of_workers(name).mean(axis=0)
        assert mean.any() or (name == "error" and outcome.change.before.nodes == 1)
        for worker in outcome.after.of_workers(name):
            assert_close(worker, kept * mean, outcome.case.rounding)


@each("ZeroOneAdam", stages=(APART,))
def test_local_steps_are_joined(outcome: Outcome) -> None:
    """x = Π(1 - lr·λ) x_then - u P and m = u / Σα with u = mean(u_i + e_i) + ē; or back to where all agreed."""
    before, after = outcome.before, outcome.after
    _, local_steps, rates, lost, _ = before.shared("interval")[:5]
    assert local_steps == 3
    anchor, p = before.shared("anchor"), before.shared("v")
    u = before.worker_errors().mean(axis=0) + before.owner_errors()
    expected, m = np.where(p > 0, (1 - lost) * anchor - u * p, anchor), u / rates
    if outcome.how == "reset":
        expected, m = anchor, before.of_workers("m").mean(axis=0)
    if "master" in after.names:
        assert_close(after.shared("master"), expected, 1e-3)  # ē is rounded when it is taken from bfloat16
        expected = torch.as_tensor(after.shared("master")).to(outcome.case.dtype).double().numpy()
    x = joined(outcome.taken_over[0]["net"])
    assert_close(x, expected, 1e-6)
    assert (p == 0).mean() > 0.1
    np.testing.assert_array_equal(x[p == 0], joined(outcome.saved[0]["net"])[p == 0])
    assert_close(after.shared("m"), m, outcome.case.rounding)
    assert not after.worker_errors().any()
    assert not after.owner_errors().any()
    assert not after.shared("touched").any()
    np.testing.assert_array_equal(after.shared("interval")[:5], [FREEZE, 0, 0, 0, rates])


# Training goes on ----------------------------------------------------------------------------------------------------


@every_outcome
def test_training_goes_on_without_a_jump(outcome: Outcome) -> None:
    """The loss never rises by more than a tenth, falls soon, and is far below that of as many steps from scratch."""
    at_first = np.mean([saved["losses"][:AFTERWARDS] for saved in outcome.saved])
    back = 3 if outcome.stage == APART and outcome.how == "reset" else 0  # to where replicas were equal
    then = np.mean([saved["losses"][-1 - back] for saved in outcome.saved])
    since = np.mean([end["losses"] for end in outcome.ends], axis=0)
    assert since.max() < then + 0.1
    assert since[-1] < then
    assert since[1:].mean() < 0.8 * at_first


@every_outcome
def test_replicas_are_equal_at_the_end(outcome: Outcome) -> None:
    ends = {end["end"] for end in outcome.ends}
    assert len(ends) == 1
    assert ends != {digest(outcome.taken_over[0]["net"].values())}
