"""The paper's synthetic study: its specs, its runs, its report."""
