"""DQN on CartPole from a replay buffer that outlives its process. ``engram demo`` runs it."""

#: By which rows are drawn.
SAMPLERS = ("prioritized", "uniform")
#: Processes that play, at most.
MOST_ACTORS = 64
