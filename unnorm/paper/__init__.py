"""The paper as data: its studies, their runs, their tables and figures."""
