"""Settings of a sampler that change while training goes on, such as ``beta``. The names are TorchRL's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from engram._support.checks import check_callable, check_choice, check_count, check_number
from engram._support.state import check_keys, integer, real
from engram.buffer import ReplayBuffer
from engram.types import Sampler

__all__ = ["LambdaScheduler", "LinearScheduler", "ParameterScheduler", "SchedulerList", "StepScheduler"]


class ParameterScheduler:
    """Base of the schedulers: :meth:`step` sets an attribute of a sampler. A subclass says to what: :meth:`value`.

    Args:
        obj: a sampler, or a buffer, whose sampler at this moment is meant.
        param_name: an attribute of the sampler that is a number and can be set, such as ``"beta"``.
        min_value, max_value: bounds of what it is set to. None: there is none.

    Raises:
        TypeError: ``obj`` is neither, or the attribute is no number. ValueError: the sampler has no such attribute, or ``min_value`` is
            above ``max_value``.

    >>> from engram import ParameterScheduler, PrioritizedSampler
    >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
    >>> class Halves(ParameterScheduler):
    ...     def value(self):
    ...         return self.initial_value / 2**self.step_count
    >>> scheduler = Halves(sampler, "beta", min_value=0.125)
    >>> for _ in range(5):
    ...     scheduler.step()
    >>> sampler.beta
    0.125
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        who = type(self).__name__
        found: object = obj.sampler if isinstance(obj, ReplayBuffer) else obj
        if not isinstance(found, Sampler):
            raise TypeError(f"{who}: obj: expected a ReplayBuffer or a sampler, got {type(found).__name__}.")
        if param_name not in dir(found):
            raise ValueError(f"{who}: param_name: expected an attribute of {found!r}, got {param_name!r}.")
        self.min_value = None if min_value is None else check_number(f"{who}: min_value", min_value)
        self.max_value = None if max_value is None else check_number(f"{who}: max_value", max_value)
        if self.min_value is not None and self.max_value is not None and self.min_value > self.max_value:
            raise ValueError(f"{who}: expected min_value of at most max_value, got {min_value} and {max_value}.")
        self.sampler = found
        self.param_name = param_name
        #: What the attribute was when the scheduler was made.
        self.initial_value = self._current()
        #: Calls of :meth:`step`.
        self.step_count = 0

    def __repr__(self) -> str:
        bounds = [f", {it}={bound:g}" for it in ("min_value", "max_value") if (bound := vars(self)[it]) is not None]
        now = f"{self._current():g}" if self.param_name in dir(self.sampler) else "gone"
        return (
            f"{type(self).__name__}({type(self.sampler).__name__}.{self.param_name}={now}, initial_value={self.initial_value:g}, "
            f"step_count={self.step_count}{''.join(bounds)})"
        )

    def _current(self) -> float:
        found = getattr(self.sampler, self.param_name)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise TypeError(
                f"{type(self).__name__}: param_name: expected an attribute that is a number, got {self.param_name!r}, which is "
                f"{found!r:.60}."
            )
        return float(found)

    def value(self) -> float:
        """What the attribute is to be after :attr:`step_count` steps, without the bounds.

        >>> from engram import LinearScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=4)
        >>> scheduler.value()  # before the first step
        0.5
        """
        raise NotImplementedError(f"{type(self).__name__}: a scheduler of your own says in value() what to set.")

    def step(self) -> None:
        """Set the attribute, for all processes where it belongs to the store, as ``alpha`` and ``beta`` do. Raises what setting it does,
        and has taken no step then.

        >>> from engram import LinearScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=4)
        >>> scheduler.step()
        >>> sampler.beta, scheduler.step_count
        (0.625, 1)
        """
        self.step_count += 1
        try:
            value = self.value()
            if self.min_value is not None:
                value = max(value, self.min_value)
            if self.max_value is not None:
                value = min(value, self.max_value)
            setattr(self.sampler, self.param_name, value)
        except BaseException:
            self.step_count -= 1
            raise

    def state_dict(self) -> dict[str, float]:
        """``step_count`` and ``initial_value``. What the scheduler was made with, such as a function, is not in it.

        >>> from engram import LinearScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=4)
        >>> scheduler.step()
        >>> scheduler.state_dict()
        {'step_count': 1, 'initial_value': 0.5}
        """
        return {"step_count": self.step_count, "initial_value": self.initial_value}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Go on from a state. The attribute stays as it is: a sampler's own state has it.

        Raises:
            KeyError, TypeError, ValueError: a missing or unknown entry, or one that is no such number. Nothing is changed.

        >>> from engram import LinearScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=4)
        >>> scheduler.load_state_dict({"step_count": 3, "initial_value": 0.5})
        >>> scheduler.step()
        >>> sampler.beta
        1.0
        """
        where = type(self).__name__
        check_keys(state_dict, ("step_count", "initial_value"), where)
        count, initial = integer(state_dict, "step_count", 0, 1 << 62, where), real(state_dict, "initial_value", where)
        self.step_count, self.initial_value = count, initial


class LambdaScheduler(ParameterScheduler):
    """The initial value times a function of the number of steps.

    Args:
        lambda_fn: gets the number of calls of :meth:`step`, and returns the factor.
        obj, param_name, min_value, max_value: as for :class:`ParameterScheduler`.

    >>> from engram import LambdaScheduler, PrioritizedSampler
    >>> sampler = PrioritizedSampler(100, alpha=0.8, beta=0.4)
    >>> scheduler = LambdaScheduler(sampler, "alpha", lambda step: 0.5**step)
    >>> scheduler.step()
    >>> sampler.alpha
    0.4
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        check_callable("LambdaScheduler: lambda_fn", lambda_fn, "a function of the number of steps")
        self.lambda_fn = lambda_fn

    def value(self) -> float:
        return self.initial_value * check_number("LambdaScheduler: lambda_fn", self.lambda_fn(self.step_count))


class LinearScheduler(ParameterScheduler):
    """From the initial value to another one in equal steps; then it stays.

    Args:
        final_value: reached after ``num_steps`` steps, the first of which moves already.
        num_steps: at least 1.
        obj, param_name: as for :class:`ParameterScheduler`.

    >>> from engram import LinearScheduler, PrioritizedSampler
    >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
    >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=4)
    >>> for _ in range(3):
    ...     scheduler.step()
    >>> sampler.beta
    0.875
    """

    def __init__(self, obj: ReplayBuffer | Sampler, param_name: str, final_value: float, num_steps: int) -> None:
        super().__init__(obj, param_name)
        self.final_value = check_number("LinearScheduler: final_value", final_value)
        self.num_steps = check_count("LinearScheduler: num_steps", num_steps)

    def value(self) -> float:
        if self.step_count >= self.num_steps:
            return self.final_value
        return self.initial_value + (self.final_value - self.initial_value) * (self.step_count / self.num_steps)


class StepScheduler(ParameterScheduler):
    """Multiplies the attribute by ``gamma``, or adds ``gamma`` to it, at every ``n_steps``-th step.

    Args:
        gamma: the factor or the summand.
        n_steps: at least 1.
        mode: ``"multiplicative"`` or ``"additive"``.
        obj, param_name, min_value, max_value: as for :class:`ParameterScheduler`.

    Raises: as :class:`ParameterScheduler`; ``ValueError``: another ``mode``.

    >>> from engram import PrioritizedSampler, StepScheduler
    >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
    >>> scheduler = StepScheduler(sampler, "beta", gamma=0.25, n_steps=2, mode="additive", max_value=1.0)
    >>> for _ in range(5):
    ...     scheduler.step()
    >>> sampler.beta
    1.0
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: Literal["multiplicative", "additive"] = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        check_choice("StepScheduler: mode", mode, ("multiplicative", "additive"))
        self.gamma, self.mode = check_number("StepScheduler: gamma", gamma), mode
        self.n_steps = check_count("StepScheduler: n_steps", n_steps)

    def value(self) -> float:
        now = self._current()
        if self.step_count % self.n_steps:
            return now
        return now * self.gamma if self.mode == "multiplicative" else now + self.gamma


class SchedulerList:
    """Several schedulers, which step together.

    Args:
        schedulers: one, or several, which step in this order.

    Raises:
        TypeError: one of them is no scheduler.

    >>> from engram import LinearScheduler, PrioritizedSampler, SchedulerList
    >>> sampler = PrioritizedSampler(100, alpha=0.5, beta=0.5)
    >>> schedulers = SchedulerList([LinearScheduler(sampler, "beta", 1.0, 2)])
    >>> schedulers.append(LinearScheduler(sampler, "alpha", 0.0, 2))
    >>> schedulers.step()
    >>> sampler.alpha, sampler.beta
    (0.25, 0.75)
    """

    def __init__(self, schedulers: ParameterScheduler | Iterable[ParameterScheduler]) -> None:
        self.schedulers: list[ParameterScheduler] = []
        if not isinstance(schedulers, Iterable):
            schedulers = [schedulers]
        for scheduler in schedulers:
            self.append(scheduler)

    def __repr__(self) -> str:
        return f"SchedulerList({self.schedulers!r})"

    def append(self, scheduler: ParameterScheduler) -> None:
        """Add one at the end. Raises ``TypeError``: it is no scheduler.

        >>> from engram import LinearScheduler, PrioritizedSampler, SchedulerList
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> schedulers = SchedulerList([])
        >>> schedulers.append(LinearScheduler(sampler, "beta", final_value=1.0, num_steps=4))
        >>> len(schedulers.schedulers)
        1
        """
        if not isinstance(scheduler, ParameterScheduler):
            raise TypeError(f"SchedulerList: expected schedulers, such as a LinearScheduler, got {scheduler!r:.60}.")
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Step all, in order.

        >>> from engram import LinearScheduler, PrioritizedSampler, SchedulerList
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> SchedulerList(LinearScheduler(sampler, "beta", final_value=1.0, num_steps=4)).step()
        >>> sampler.beta
        0.625
        """
        for scheduler in self.schedulers:
            scheduler.step()
