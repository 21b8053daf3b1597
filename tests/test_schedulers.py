"""Schedulers of a sampler's settings, beside TorchRL's, and their refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engram
from engram import (
    LambdaScheduler,
    LazyTensorStorage,
    LinearScheduler,
    ParameterScheduler,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    SchedulerList,
    StepScheduler,
)

NUMBERS = st.floats(0, 4, allow_nan=False)
BOUNDS = st.one_of(st.none(), st.floats(0, 2))


def sampler(beta):
    return PrioritizedSampler(8, alpha=0.5, beta=beta)


@pytest.fixture(scope="module")
def theirs():
    """Makes a sampler of TorchRL's with a beta."""
    rl = pytest.importorskip("torchrl.data.replay_buffers")

    def make(beta):
        made = rl.RandomSampler()
        made.beta = beta
        return made

    return pytest.importorskip("torchrl.data.replay_buffers.scheduler"), make


@given(st.data(), NUMBERS, st.integers(1, 12))
def test_values_are_those_of_torchrl(theirs, data, beta, steps):
    module, make = theirs
    kind = data.draw(st.sampled_from(["Lambda", "Linear", "Step"]))
    low, high = data.draw(BOUNDS), data.draw(BOUNDS)
    if low is not None and high is not None:
        low, high = sorted((low, high))
    bounds = {"min_value": low, "max_value": high}
    if kind == "Lambda":
        arguments = {"lambda_fn": lambda step: 1 / (1 + step), **bounds}
    elif kind == "Linear":
        arguments = {"final_value": data.draw(NUMBERS), "num_steps": data.draw(st.integers(1, 9))}
    else:
        mode = data.draw(st.sampled_from(["multiplicative", "additive"]))
        arguments = {"gamma": data.draw(NUMBERS), "n_steps": data.draw(st.integers(1, 4)), "mode": mode, **bounds}
    other, own = make(beta), sampler(beta)
    both = [getattr(module, f"{kind}Scheduler")(other, "beta", **arguments)]
    both.append(getattr(engram, f"{kind}Scheduler")(own, "beta", **arguments))
    for _ in range(steps):
        for one in both:
            one.step()
        assert own.beta == pytest.approx(float(other.beta), rel=1e-12, abs=1e-12)


def test_of_a_buffer_and_its_store():
    with PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(4)) as rb:
        rb.extend([1.0, 2.0])
        schedulers = SchedulerList(LinearScheduler(rb, "beta", final_value=1.0, num_steps=2))
        schedulers.append(StepScheduler(rb.sampler, "alpha", gamma=0.5))
        schedulers.step()
        assert (rb.sampler.beta, rb.sampler.alpha) == (0.7, 0.3)
        schedulers.step()
        assert (rb.sampler.beta, rb.sampler.alpha) == (1.0, 0.15)


def test_state_goes_on():
    first, again = sampler(0.4), sampler(0.4)
    scheduler = LinearScheduler(first, "beta", 1.0, 10)
    for _ in range(4):
        scheduler.step()
    again.beta = first.beta  # as a checkpoint would
    other = LinearScheduler(again, "beta", 1.0, 10)
    other.load_state_dict(scheduler.state_dict())
    for one in (scheduler, other):
        one.step()
    assert first.beta == again.beta == pytest.approx(0.7)
    for wrong, error in (
        ({}, KeyError),
        ({"step_count": 1, "initial_value": 0.4, "more": 1}, KeyError),
        ({"step_count": -1, "initial_value": 0.4}, ValueError),
        ({"step_count": 1.0, "initial_value": 0.4}, TypeError),
        ({"step_count": 1, "initial_value": "x"}, TypeError),
    ):
        with pytest.raises(error, match="LinearScheduler"):
            other.load_state_dict(wrong)
        assert other.state_dict() == {"step_count": 5, "initial_value": 0.4}


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: LinearScheduler(1, "beta", 1.0, 2), TypeError, "obj: expected a ReplayBuffer or a sampler, got int"),
        (
            lambda: LinearScheduler(RandomSampler(), "beta", 1.0, 2),
            ValueError,
            "expected an attribute of RandomSampler.*'beta'",
        ),
        (
            lambda: LinearScheduler(sampler(0.4), "dtype", 1.0, 2),
            TypeError,
            "expected an attribute that is a number, got 'dtype'",
        ),
        (lambda: LinearScheduler(sampler(0.4), "beta", 1.0, 0), ValueError, "num_steps"),
        (
            lambda: StepScheduler(sampler(0.4), "beta", mode="x"),
            ValueError,
            "mode: expected 'multiplicative' or 'additive', got 'x'",
        ),
        (lambda: StepScheduler(sampler(0.4), "beta", n_steps=0), ValueError, "n_steps"),
        (
            lambda: LambdaScheduler(sampler(0.4), "beta", float, 2, 1),
            ValueError,
            "min_value of at most max_value, got 2 and 1",
        ),
        (
            lambda: LinearScheduler(sampler(0.4), "beta", "1", 2),
            TypeError,
            "final_value: expected a finite number, got str",
        ),
        (lambda: LinearScheduler(sampler(0.4), "beta", float("nan"), 2), ValueError, "final_value: .* got nan"),
        (lambda: StepScheduler(sampler(0.4), "beta", None), TypeError, "gamma: expected a finite number, got NoneType"),
        (lambda: StepScheduler(sampler(0.4), "beta", min_value="0"), TypeError, "min_value: .* got str"),
        (lambda: StepScheduler(sampler(0.4), "beta", max_value=float("nan")), ValueError, "max_value: .* got nan"),
        (lambda: LambdaScheduler(sampler(0.4), "beta", 3), TypeError, "lambda_fn: expected a function .* got int"),
        (lambda: SchedulerList(None), TypeError, "expected schedulers, such as a LinearScheduler, got None"),
    ],
)
def test_what_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize(
    ("factor", "error", "said"),
    [
        (None, TypeError, "lambda_fn: expected a finite number, got NoneType"),
        (float("nan"), ValueError, "lambda_fn: .* got nan"),
        (-1.0, ValueError, "beta: expected a finite number of at least 0, got -0.4"),
    ],
)
def test_a_step_that_is_refused_was_not_taken(factor, error, said):
    own = sampler(0.4)
    scheduler = LambdaScheduler(own, "beta", lambda step: factor)
    with pytest.raises(error, match=said):
        scheduler.step()
    assert (own.beta, scheduler.step_count) == (0.4, 0)


def test_one_of_ones_own():
    class Halves(ParameterScheduler):
        def value(self):
            return self.initial_value / 2**self.step_count

    own = sampler(0.8)
    scheduler = Halves(own, "beta", min_value=0.3)
    seen = []
    for _ in range(3):
        scheduler.step()
        seen.append(own.beta)
    assert seen == [0.4, 0.3, 0.3]
    with pytest.raises(NotImplementedError, match=r"says in value\(\) what to set"):
        ParameterScheduler(own, "beta").step()


def test_reprs_say_where_they_are():
    it = sampler(0.5)
    linear = LinearScheduler(it, "beta", 1.0, 4)
    linear.step()
    step = StepScheduler(it, "alpha", min_value=0.25, max_value=1)
    assert repr(linear) == "LinearScheduler(PrioritizedSampler.beta=0.625, initial_value=0.5, step_count=1)"
    bounds = "min_value=0.25, max_value=1"
    assert repr(step) == f"StepScheduler(PrioritizedSampler.alpha=0.5, initial_value=0.5, step_count=0, {bounds})"
    assert repr(SchedulerList([linear, step])) == f"SchedulerList([{linear!r}, {step!r}])"
    assert repr(SchedulerList([])) == "SchedulerList([])"


@pytest.mark.parametrize("wrong", [3, None, "linear", LinearScheduler])
def test_a_list_of_something_else_is_refused_at_once(wrong):
    schedulers = SchedulerList(LinearScheduler(sampler(0.5), "beta", 1.0, 4))
    with pytest.raises(TypeError, match="SchedulerList: expected schedulers, such as a LinearScheduler, got "):
        SchedulerList([wrong])
    with pytest.raises(TypeError, match="SchedulerList: expected schedulers"):
        schedulers.append(wrong)
    assert len(schedulers.schedulers) == 1
