"""Train one PyTorch model on many workers that rarely communicate.

    sync = offbeat.diloco(model, optimizer, every=64)      # then sync.step() in place of optimizer.step()

Most scripts need one method and no other name. `offbeat.methods.__all__` lists the methods, `offbeat methods`
in a terminal explains them, and `method` reads one from text. All other names, by what you do with them:

A run: Synchronizer Report GroupReport CodedReport Totals flatten ddp_hook coded_sampler CodedSampler DataPart
Errors: OffbeatError PeerLost Disagreement NotFinite CheckpointMismatch Deadlock RunFinished
When to communicate, `every=`: Schedule Every QSR Adaptive AdaComm Seconds Budget Then Never Clock
With whom, `group=`: Peers World Subgroups Pairs Butterfly Communicator Torch Solo Metered Throttled Pending
    Elastic
What is sent, `reduce=`: Reducer Mean Quantized TopK RandomBlock LowRank TwoLevel ErrorFeedback Code Packed
How it is applied, `update=`: Update Replace Rebase Correct Detached Outer SlowMo Overlap Eager Gossip SGD
Parts of a method: Part Exchange params grads moments PseudoSync Stages AUCLoss PushPull LocalRule LocalStep
    GLU Compensated GroupAverage EagerGradients CodedGradients Attendance
Simulation: simulate Virtual Network Level Compute Constant Jittered HeavyTailed Stragglers Uneven Recorded
    Failures

There are also the packages offbeat.integrations (transformers, accelerate, lightning), offbeat.plan,
offbeat.lab and offbeat.tasks. docs/reference.md has the same groups with every signature.
"""

import sys as _sys

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in typing, whose import would take longer than the rest of this file
if TYPE_CHECKING:
    from offbeat.names import *  # noqa: F403
    from offbeat.names import __all__ as __all__
else:
    del TYPE_CHECKING
    _ModuleType = type(_sys)

    class _Package(_ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            """An import of the package `offbeat.simulate` must not hide the function of that name."""
            if name != "simulate" or not isinstance(value, _ModuleType):
                super().__setattr__(name, value)

    _sys.modules[__name__].__class__ = _Package

    def __getattr__(name: str) -> object:
        """Import all names once one of them is used, so that `offbeat --version` need not wait for torch."""
        if name == "__all__" or not name.startswith("__"):
            from importlib import import_module

            names = import_module("offbeat.names")
            public = getattr(names, "__all__", [])  # nothing while it is being imported
            globals().update({each: getattr(names, each) for each in public})
            if name == "__all__":
                return public
            if name in globals():  # also a package that was imported with them, such as offbeat.methods
                return globals()[name]
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """The public names and the packages, without what this file needs itself."""
        from importlib import import_module

        here = [name for name in globals() if not name.startswith("_") or name.startswith("__")]
        return [*here, *getattr(import_module("offbeat.names"), "__all__", [])]
