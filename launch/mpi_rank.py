"""One rank under mpirun: `python -m launch.mpi_rank` names itself as torch expects it, then does what any rank does."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping

FROM_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of this process. Raises KeyError outside of mpirun."""
    return {name: environment[source] for name, source in FROM_OPEN_MPI.items()}


if __name__ == "__main__":
    os.environ.update(rank_variables(os.environ))
    runpy.run_module("training", run_name="__main__", alter_sys=True)
