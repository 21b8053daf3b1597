"""Stored trajectories by what is true of them. What imports tensordict is imported when it is first used."""
