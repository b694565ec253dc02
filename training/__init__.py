"""Router training: relaxation, constraint, trainer, tasks, data, baselines and plots."""
