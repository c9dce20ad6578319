"""Which tests go to the same worker of pytest-xdist."""

from xdist.scheduler import LoadScopeScheduling

from lockstep.parity.bugs import BY_NAME


class ByPrograms(LoadScopeScheduling):
    """What shares compiled programs and remembered answers goes to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        case = nodeid.partition("[")[2].removesuffix("]")
        if "::test_rung[" in nodeid:
            policy, _, _, model, _, _ = case.split("-")  # policy, remat, N, model, layers, rung
            return f"{policy} {model}"
        if "::test_caught[" in nodeid:
            bug = BY_NAME[case]
            return f"{bug.framework} {sorted(bug.flags.items())}"
        return nodeid
