"""The paper's study of MNIST: its Table 5 with the likelihoods bounded on both sides, and its samples."""
