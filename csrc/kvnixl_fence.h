/* Memory barriers for words that a CPU writes and a device (a NIC, another
 * process) reads, named by what they are for.
 *
 * Why these instructions:
 *   x86-64   Stores to write-back memory become visible in program order and
 *            DMA is cache coherent, so `sfence` would do for plain stores;
 *            `mfence` also orders earlier loads, non-temporal stores and
 *            write-combining buffers, which the caller's code (a memcpy of KV)
 *            may have used. Source: Intel SDM vol. 3A, 9.2 "Memory Ordering".
 *   aarch64  A device is outside the inner-shareable domain, so the barrier has
 *            to name the full system: `dsb sy`, and `dsb st` and `dsb ld` for
 *            the one-way forms (rdma-core and UCX get by with the weaker
 *            `dmb oshst` and `dmb oshld`). Source: Arm ARM, B2.3.
 * A compiler barrier is part of each of them ("memory" clobber).
 */
#ifndef KVNIXL_FENCE_H
#define KVNIXL_FENCE_H

#if defined(__x86_64__)

/* Everything before is visible to CPUs and devices before anything after. */
static inline void kvnixl_memory_fence(void) { __asm__ __volatile__("mfence" ::: "memory"); }

/* Stores that prepare data, before the store that announces it. */
static inline void kvnixl_publish_fence(void) { __asm__ __volatile__("sfence" ::: "memory"); }

/* The load that saw an announcement, before the loads of what it announces. */
static inline void kvnixl_observe_fence(void) { __asm__ __volatile__("lfence" ::: "memory"); }

#elif defined(__aarch64__)

static inline void kvnixl_memory_fence(void) { __asm__ __volatile__("dsb sy" ::: "memory"); }

static inline void kvnixl_publish_fence(void) { __asm__ __volatile__("dsb st" ::: "memory"); }

static inline void kvnixl_observe_fence(void) { __asm__ __volatile__("dsb ld" ::: "memory"); }

#else
#error "kvnixl: no memory fence is known for this architecture (x86-64 and aarch64 are supported)"
#endif

/* The store that takes a promise back, before the memory is reused. Later
 * stores (the new owner's) must not pass it and later loads must not be served
 * early either, so it is the full barrier. */
static inline void kvnixl_revoke_fence(void) { kvnixl_memory_fence(); }

#endif /* KVNIXL_FENCE_H */
