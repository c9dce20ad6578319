"""Rung 11: compares a run on a mesh with the run of one device."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from lockstep.config.mesh import Mesh
from lockstep.judge.tolerances import RUN
from lockstep.judge.verdict import Finding, check_bound, empty, locate
from lockstep.parity.automaton import loss_scale
from lockstep.parity.case import Case
from lockstep.parity.rungs import compare_update
from lockstep.parity.side import Side
from lockstep.parity.trajectories import compare_runs, train_program
from lockstep.parity.world import World


def worlds(case: Case) -> Iterator[Finding]:
    """Compares each side on the config's mesh with the other one on one device.

    A mutant alone, and against its own healthy twin: what it is looked for in is the mesh.
    """
    mesh, rows = case.config.mesh, case.config.global_batch_size
    alone = case.replace(mesh="data=1", batch_size=rows)
    # A sum of parts, each rounded on its device, rounds elsewhere than one sum.
    alone = replace(alone, pair=replace(case.pair, same_roundings=False))
    sick = [side for side in case.sides if side.variant]
    if not sick:
        for home, side in (case.sides, case.sides[::-1]):
            yield from on_mesh(alone, home, side, mesh)
    for side in sick:
        yield from on_mesh(alone, side.sound, side, mesh)


def on_mesh(case: Case, home: Side, side: Side, mesh: Mesh) -> Iterator[Finding]:
    """The curve; below float64 one step's moments; an evaluation in float64, which has no noise;
    and under a loss scale GradScaler's automaton."""
    with closing(World(side, mesh)) as world:
        ours, theirs = train_program(home, case), train_program(world, case)
        yield from compare_runs(case, ours, theirs, (ours,), world.name, dtype=case.rounding)
        if not case.exact:
            both = replace(case, a=home, b=world)
            yield from locate(world.name, compare_update(both, case.config, case.perturbed))
        if case.config.precision.eval_roles.param == "float64":
            at_home, away = (
                each.evaluate(case.config, case.perturbed, case.batches(3))
                for each in (home, world)
            )
            rule = "gap of the evaluations, in nats"
            yield check_bound(rule, world.name, abs(at_home - away), RUN.bound)
        if case.config.precision.roles.loss_scaling:
            yield from loss_scale(replace(case, a=home, b=world))
        yield empty("ranks that part", world.name, world.apart)  # in anything that was asked
