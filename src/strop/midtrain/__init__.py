"""Mid-training: data, phases, supervised trajectories; and the pre-training of the tiny base that ships with strop."""
