"""``gpu.sh``: what is worth doing with minutes on a GPU, in which order, and what an earlier piece has done already."""
