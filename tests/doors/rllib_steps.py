"""Episodes of several environments as RLlib's runners hand them on, in chunks, drawn at random."""

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode


class Runner:
    """Chunks of episodes: ``dict`` observations, ``extras`` of the model, ``lists`` in place of arrays, or ``plain``."""

    def __init__(self, kind, seed=0, environments=3):
        self.rng, self.kind, self.number = np.random.default_rng(seed), kind, 0
        self.open = [self._new() for _ in range(environments)]

    def chunks(self, most=6):
        """The next steps of each environment, up to ``most``."""
        made = []
        for i, episode in enumerate(self.open):
            for _ in range(self.rng.integers(1, most + 1)):
                over = self.rng.random() < 0.15
                self._step(episode, over and self.rng.random() < 0.7, over)
                if over:
                    break
            self.open[i] = self._new() if episode.is_done else episode.cut(len_lookback_buffer=1)
            made.append(episode if self.kind == "lists" else episode.to_numpy())
        return made

    def _new(self):
        self.number += 1
        episode = SingleAgentEpisode(id_=f"episode {self.number}")
        episode.add_env_reset(self._observed(), {})
        return episode

    def _step(self, episode, terminated, over):
        rng = self.rng
        extra = None
        if self.kind == "extras":
            extra = {"logits": rng.random(2, np.float32), "state_out": {"h": rng.random(3)}}
        episode.add_env_step(
            self._observed(),
            int(rng.integers(5)),
            float(rng.random()),
            {},
            terminated=terminated,
            truncated=over and not terminated,
            extra_model_outputs=extra,
        )

    def _observed(self):
        rng = self.rng
        if self.kind == "dict":
            return {"at": rng.random(2), "seen": {"depth": rng.integers(256, size=(4, 4), dtype=np.uint8)}}
        return rng.random(3, np.float32)


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
