"""Who goes when the store is full, and rows whose keys are numbers."""

import torch

from engram import (
    FifoRemover,
    Lifo,
    LowestPriority,
    MaxTimesSampled,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    StalestFirst,
)
from tests.features.base import Feature
from tests.features.rows import length_of, scrambled, steps, whos_in, whos_of


class Remover(Feature):
    """A full store: a model says which step each new one replaces."""

    capacity = 12

    def victim(self, known):
        """Who goes. None: the model does not know."""
        raise NotImplementedError

    def write(self, rb, known, *trajectories):
        for number in trajectories:
            for step in steps(number).split(1):
                who, before = int(step["who"]), whos_of(rb)
                rows = rb.extend(step)
                self.written(rb, rows, who)
                known.rows[who] = int(rows)
                if len(before) == rb.storage.max_size and self.victim(known) is None:
                    known.whos = whos_of(rb)
                    assert known.whos < before | {who}
                    assert who in known.whos
                    known.order = [who]
                else:
                    self.replace(known, who, rb.storage.max_size)

    def written(self, rb, rows, who):
        """Say more about the new step."""

    def wrote(self, known, *trajectories):
        for number in trajectories:
            for step in range(length_of(number)):
                self.replace(known, 100 * number + step, self.capacity)

    def replace(self, known, who, capacity):
        if len(known.whos) == capacity:
            gone = self.victim(known)
            known.whos.remove(gone)
            if gone in known.order:
                known.order.remove(gone)
        known.whos.add(who)
        known.order.append(who)


class Fifo(Remover):
    def arguments(self):
        return {"sampler": RandomSampler(), "remover": FifoRemover()}

    def broken(self):
        return {"sampler": RandomSampler(), "remover": Lifo()}

    def victim(self, known):
        return known.order[0] if set(known.order) == known.whos else None


class Newest(Remover):
    def arguments(self):
        return {"sampler": RandomSampler(), "remover": Lifo()}

    def broken(self):
        return {"sampler": RandomSampler(), "remover": FifoRemover()}

    def victim(self, known):
        return known.order[-1] if known.order else None


class Stalest(Remover):
    def arguments(self):
        return {"sampler": RandomSampler(), "remover": StalestFirst("version")}

    def broken(self):
        return {"sampler": RandomSampler(), "remover": StalestFirst("who")}

    def victim(self, known):
        return min(known.whos, key=scrambled)


class Lowest(Stalest):
    def arguments(self, remover=None):
        return {"sampler": PrioritizedSampler(2 * self.capacity, 1.0, 1.0), "remover": remover or LowestPriority()}

    def broken(self):
        return self.arguments(FifoRemover())

    def written(self, rb, rows, who):
        rb.update_priority(rows, torch.tensor([1.0 + scrambled(who) / 10007]))


class MostSampled(Remover):
    """Each step is followed by a batch, so that some were sampled more often. The counts, and the ages of equal ones, are the store's."""

    def arguments(self):
        return {"sampler": RandomSampler(), "remover": MaxTimesSampled()}

    def broken(self):
        return {"sampler": RandomSampler(), "remover": FifoRemover()}

    def write(self, rb, known, *trajectories):
        for number in trajectories:
            for step in steps(number).split(1):
                whos, counts, first = self.counted(rb)
                (row,) = rb.extend(step).tolist()
                if len(whos) == rb.storage.max_size:
                    now = self.counted(rb)[1]
                    if all(
                        now[other] == counts[other] for other in counts if other != row
                    ):  # nobody else has sampled meanwhile
                        assert row == first
                whos[row] = int(step["who"])
                rb.count_usage()
                rb.sample()
        known.whos = whos_of(rb)

    def counted(self, rb):
        """Who is in each row, how often each was sampled, and which row goes first."""
        if not rb.storage.initialized:
            return {}, {}, None
        rb.count_usage()
        rows = torch.arange(len(rb))
        counts = rb.storage.store.indexes["main", "usage"].counts(rows).tolist()
        ages = rb.storage.tickets_of(rows).tolist()
        first = min(rows.tolist(), key=lambda row: (-counts[row], ages[row]))
        return dict(enumerate(rb[:]["who"].tolist())), dict(enumerate(counts)), first

    def wrote(self, known, *trajectories):
        """Who went is not known."""
        known.whos |= whos_in(*trajectories)
        known.exact = False

    def stored(self, rb, known):
        whos = whos_of(rb)
        assert whos <= known.whos
        assert whos == known.whos if known.exact else len(whos) == rb.storage.max_size
        known.whos, known.exact = whos, True


class Numbered(Feature):
    """Rows that are dicts, with numbers among their keys."""

    cls = ReplayBuffer

    def data(self, number):
        rows = steps(number)
        return {
            "who": rows["who"],
            "episode": rows["episode"],
            7: rows["obs"],
            "next": {0: rows["next", "reward"], "done": rows["next", "done"]},
        }

    def sound(self, batch, whos):
        who = batch["who"]
        assert set(who.tolist()) <= whos
        assert torch.equal(batch[7].squeeze(-1), who.float())
        assert torch.equal(batch["next"][0].squeeze(-1), (who % 100).float())

    def spoil(self, rb, known):
        """Change what stands under a number."""
        rb[known.rows[101]] = {**rb[known.rows[101]], 7: torch.zeros(1)}
