"""What goes on between batches: prefetching, and parameters that follow a schedule."""

import torch

from engram import LinearScheduler, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from tests.features.base import LEAST, Feature
from tests.features.rows import whos_of


class Prefetched(Feature):
    """Batches are drawn ahead: of any steps that are stored."""

    def arguments(self):
        return {"sampler": RandomSampler(), "prefetch": 2}

    def spoil(self, rb, known):
        super().spoil(rb, known)
        for _ in range(3):  # batches that were drawn before may have the step
            rb.sample()


class PrefetchedEpochs(Feature):
    """Each step comes once per epoch, whatever was drawn ahead."""

    common = True

    def arguments(self, **more):
        return {"sampler": SamplerWithoutReplacement(**more), "prefetch": 2}

    def broken(self):
        return self.arguments(drop_last=True)

    def check(self, rb, known):
        for batch in rb:  # the rest of an epoch
            self.sound(batch, known.whos)
        drawn = []
        for batch in rb:
            self.sound(batch, known.whos)
            drawn += batch["who"].tolist()
        assert sorted(drawn) == sorted(known.whos)


class Scheduled(Feature):
    """``beta`` follows a schedule, with the weights of batches. ``drawn`` has as many entries as steps were made, of all processes."""

    common = True
    first, last, steps = 0.25, 1.0, 40

    def arguments(self, beta=first):
        return {"sampler": PrioritizedSampler(2 * self.capacity, 0.5, beta, eps=0.0)}

    def broken(self):
        return self.arguments(0.5)

    def write(self, rb, known, *trajectories):
        super().write(rb, known, *trajectories)
        for number in trajectories:
            whos = self.data(number)["who"].tolist()
            rows = torch.tensor([known.rows[who] for who in whos])
            rb.update_priority(rows, torch.tensor([1.0 + who % 100 for who in whos]))

    def play(self, rb, trajectories):
        known = super().play(rb, trajectories)
        self.step(rb, known)
        return known

    def reset(self, known, what):
        """A script that opens its folder again says once more what the schedule begins with, until its next step."""
        known.exact = what != "reopened"
        return known

    def stored(self, rb, known):
        super().stored(rb, known)
        if not known.exact:
            assert rb.sampler.beta in (self.first, self.beta(known))
            self.step(rb, known)
            known.exact = True

    def beta(self, known):
        return self.first + (self.last - self.first) * len(known.drawn) / self.steps

    def step(self, rb, known):
        scheduler = LinearScheduler(rb, "beta", self.last, self.steps)
        if known.drawn:
            scheduler.load_state_dict({"step_count": len(known.drawn), "initial_value": self.first})
        scheduler.step()
        known.drawn.add(len(known.drawn))

    def check(self, rb, known):
        assert whos_of(rb) == known.whos
        assert rb.sampler.beta == self.beta(known)
        for _ in range(2):
            for _ in range(LEAST):
                batch = rb.sample()
                self.sound(batch, known.whos)
                least = min(1.0 + who % 100 for who in known.whos)
                expected = ((1.0 + batch["step"]) / least) ** (-0.5 * self.beta(known))
                torch.testing.assert_close(batch["priority_weight"], expected)
            self.step(rb, known)
