"""Episodes of several environments as RLlib's runners hand them on, in chunks, drawn at random; and RLlib's rule of what stays."""

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode


class Runner:
    """Chunks of episodes: ``dict`` observations, ``extras`` of the model, ``lists`` in place of arrays, or ``plain``.

    Each observation holds the number of its episode and its step there.
    """

    def __init__(self, kind="plain", seed=0, environments=3, most=6, over=0.15, longest=10_000):
        self.rng, self.kind, self.number = np.random.default_rng(seed), kind, 0
        self.most, self.over, self.longest = most, over, longest
        self.open = [self._new() for _ in range(environments)]

    def chunks(self):
        """The next steps of each environment, up to ``most``."""
        made = []
        for i, (number, episode) in enumerate(self.open):
            for _ in range(self.rng.integers(1, self.most + 1)):
                over = self.rng.random() < self.over or episode.t + 1 >= self.longest
                self._step(number, episode, over and self.rng.random() < 0.7, over)
                if over:
                    break
            self.open[i] = self._new() if episode.is_done else (number, episode.cut(len_lookback_buffer=1))
            made.append(episode if self.kind == "lists" else episode.to_numpy())
        return made

    def _new(self):
        self.number += 1
        episode = SingleAgentEpisode(id_=f"episode {self.number}")
        episode.add_env_reset(self._observed(self.number, 0), {})
        return self.number, episode

    def _step(self, number, episode, terminated, over):
        rng, extra = self.rng, None
        if self.kind == "extras":
            extra = {"logits": rng.random(2, np.float32), "state_out": {"h": rng.random(3)}}
        episode.add_env_step(
            self._observed(number, episode.t + 1),
            int(rng.integers(5)),
            number + episode.t / 1000,
            {},
            terminated=terminated,
            truncated=over and not terminated,
            extra_model_outputs=extra,
        )

    def _observed(self, number, t):
        where = np.array([number, t, self.rng.random()], np.float32)
        if self.kind == "dict":
            return {"at": where, "seen": {"depth": self.rng.integers(256, size=(4, 4), dtype=np.uint8)}}
        return where


class Rule:
    """Which steps stay, by their episodes, the oldest first: as RLlib's documentation says, without a store or an index.

    ``at_the_end``: the buffer evicts after all episodes of a call, and not after each. One episode alone loses its oldest steps, and
    keeps at least seven eighths of the capacity.
    """

    def __init__(self, capacity, at_the_end):
        self.capacity, self.at_the_end, self.held = capacity, at_the_end, {}

    def add(self, chunks):
        for chunk in chunks:
            self.held.setdefault(chunk.id_, []).extend(steps(chunk))
            if not self.at_the_end:
                self._evict()
        self._evict()
        if self.total > self.capacity:
            (only,) = self.held.values()
            del only[: self.total - (self.capacity - self.capacity // 8)]

    @property
    def total(self):
        return sum(map(len, self.held.values()))

    @property
    def names(self):
        """Each step that stays, and what it holds."""
        return {(name, step[0]): step for name, held in self.held.items() for step in held}

    def _evict(self):
        while self.total > self.capacity and len(self.held) > 1:
            del self.held[next(iter(self.held))]


def steps(episode):
    """The steps of an episode, each with its time and the bytes of all that it holds."""
    (n, t, terminated, truncated), values = flat(episode)
    found = []
    for at in range(n):
        held = [(path, values[path][at : at + 1 + (path[0] == "observations")].tobytes()) for path in sorted(values)]
        last = at == n - 1
        found.append((t + at, tuple(held), last and terminated, last and truncated))
    return found


def flat(episode):
    """All that an episode holds, as arrays by name."""
    found = {
        "observations": episode.get_observations(),
        "actions": episode.get_actions(),
        "rewards": episode.get_rewards(),
        **{f"extra {key}": episode.get_extra_model_outputs(key) for key in episode.extra_model_outputs},
    }
    about = (len(episode), episode.t_started, episode.is_terminated, episode.is_truncated)
    return about, dict(_leaves(found))


def _leaves(value, *root):
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {key: [one[key] for one in value] for key in value[0]}
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _leaves(value[key], *root, key)
    else:
        yield root, np.asarray(value)


def same(one, other):
    (about, ours), (wanted, theirs) = flat(one), flat(other)
    assert about == wanted
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert np.array_equal(value, theirs[path]), path
