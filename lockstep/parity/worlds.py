"""Rung 11: on several devices, the run of one."""

from collections.abc import Iterator
from dataclasses import replace

from lockstep.config.mesh import Mesh
from lockstep.parity.automaton import loss_scale
from lockstep.parity.case import Case
from lockstep.parity.side import Side
from lockstep.parity.tolerances import CURVE
from lockstep.parity.trajectories import compare_runs, train_program
from lockstep.parity.verdict import Finding, check_bound, empty
from lockstep.parity.world import World

MESHES = (Mesh(data=2), Mesh(fsdp=2), Mesh(data=4), Mesh(fsdp=4), Mesh(data=2, fsdp=2))
ROWS = 4  # of a micro-batch, which all of these divide


def worlds(case: Case) -> Iterator[Finding]:
    """Each framework on a mesh against the other one on one device; the meshes take turns."""
    case = case.replace(batch_size=ROWS)
    for home, side in (case.sides, case.sides[::-1]):
        yield from on_mesh(case, home, side, mesh_of(case, side))


def mesh_of(case: Case, side: Side) -> Mesh:
    """Another for each remat mode and policy, so that few programs meet all meshes."""
    config = case.config
    turn = f"{config.execution.remat}{config.precision.policy}{config.optim.accum}{side.framework}"
    return MESHES[sum(turn.encode()) % len(MESHES)]


def on_mesh(case: Case, home: Side, side: Side, mesh: Mesh) -> Iterator[Finding]:
    """The curve and the evaluation; under a loss scale GradScaler's automaton, too."""
    world = World(side, mesh)
    try:
        ours, theirs = train_program(home, case), train_program(world, case)
        yield from compare_runs(case, ours, theirs, (ours,), world.name, dtype=case.rounding)
        if case.exact:
            batches = case.batches(3)
            gap = abs(
                home.evaluate(case.config, case.perturbed, batches)
                - world.evaluate(case.config, case.perturbed, batches)
            )
            yield check_bound("gap of the evaluations, in nats", world.name, gap, CURVE.bound)
        if case.config.precision.roles.loss_scaling:
            yield from loss_scale(replace(case, a=home, b=world))
        yield empty("ranks that part", world.name, world.apart)
    finally:
        world.close()
