"""Memory barriers between CPU stores and a device's reads (``csrc/kvnixl_fence.h``)."""

cdef extern from "kvnixl_fence.h" nogil:
    void kvnixl_memory_fence()
    void kvnixl_publish_fence()
    void kvnixl_revoke_fence()
    void kvnixl_observe_fence()


def memory_fence() -> None:
    """Full barrier: all earlier loads and stores of this thread are visible to other CPUs and to
    devices (a NIC that reads this memory) before any later one.
    """
    kvnixl_memory_fence()


def publish_fence() -> None:
    """Between the stores that prepare data and the store that announces it."""
    kvnixl_publish_fence()


def revoke_fence() -> None:
    """Between the store that takes a promise back (a cleared lease slot) and the reuse of what was
    promised (the freed blocks)."""
    kvnixl_revoke_fence()


def observe_fence() -> None:
    """Between the load that saw an announcement and the loads of what it announces."""
    kvnixl_observe_fence()
