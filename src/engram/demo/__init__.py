"""DQN on CartPole from a replay buffer that outlives its process. ``engram demo`` runs it."""
