"""Which tests go to the same worker of pytest-xdist."""

import re

from xdist.scheduler import LoadScopeScheduling

from lockstep.parity.catalogue import BY_NAME

# What they start or compile once a module would be started on each worker.
OWN_SIDES = re.compile(
    r"/test_(second_pair|minimal|reference_models|side|installation)\.py::"
    r"|cuda/test_lints\.py::"
)


class ByPrograms(LoadScopeScheduling):
    """Sends tests that share compiled programs and remembered answers to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        case = nodeid.partition("[")[2].removesuffix("]")
        if "::test_rung[" in nodeid:
            policy, _, _, model, *_ = case.split("-")  # policy, remat, N, model, ...
            return case if "=" in case else f"{policy} {model}"  # on a mesh it shares no program
        if "::test_caught[" in nodeid or "::test_the_sound_pair_is_equal" in nodeid:
            bug = BY_NAME[case]
            if "mesh" in bug.flags:
                return "bugs of meshes"
            return str(sorted(bug.flags.items()))
        if "::test_the_ladder_with_" in nodeid:  # islands, formats
            return nodeid.partition("[")[0]
        if OWN_SIDES.search(nodeid):
            return nodeid.partition("::")[0]
        return nodeid
