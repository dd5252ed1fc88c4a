"""Routed experts distributed over processes with torch.distributed."""

from lancebill.parallel.experts import ALL_TO_ALL, GATHER, ExpertParallel
from lancebill.parallel.groups import Mesh, RankGroup
from lancebill.parallel.replicas import Assignment

__all__ = ["ALL_TO_ALL", "GATHER", "Assignment", "ExpertParallel", "Mesh", "RankGroup"]
