"""Who runs the cells of a plan. All engines have a function `run(runner, schedule, cells, ...)` and share the rest.

schedule.py     which cells are settled; claims the others, one process at a time
workload.py     how much work a cell is, who takes which first, and how many processes pay
cell_runner.py  runs a cell in this process, with the adapter of the cell before if it fits
progress.py     what a run reports, here and from one process to another

local.py        this process: one cell after the other, or several as streams of one `come.Fleet`
processes.py    several processes of this machine
ray.py          workers on a Ray cluster
"""
