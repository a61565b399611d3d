/* Lease slots and landing cells: 8-byte words that two parties share without a
 * lock.
 *
 *   slot   in the producer's memory, written by its CPU, read by NICs and other
 *          processes; holds a lease's nonce while the lease holds, else another
 *          value (0: empty)
 *   cell   in the reader's memory, written by a READ that copies a slot
 *
 * Every access is one relaxed 8-byte atomic: the compiler can neither split,
 * repeat, merge nor drop it. Order comes from the barriers in kvnixl_fence.h,
 * which the callers place once per batch.
 */
#ifndef KVNIXL_SLOTS_H
#define KVNIXL_SLOTS_H

#include <stdint.h>

static inline void kvnixl_word_store(int64_t *word, int64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static inline int64_t kvnixl_word_load(const int64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

/* Nonces are 1 to 2**63-1 and count up. One with an empty low half is left out:
 * a NIC that reads the halves of a word at different moments could make it of a
 * cleared word (0) and of a later nonce. Any other mixture takes two nonces with
 * one low half, which are 2**32 leases apart. */
static inline int64_t kvnixl_next_nonce(int64_t nonce) {
    nonce = nonce == INT64_MAX ? 1 : nonce + 1;
    return (nonce & 0xFFFFFFFF) != 0 ? nonce : nonce + 1;
}

/* Fills a cell before the READ that is to bring `nonce`. The complement differs
 * from the nonce in every bit, so a cell equals the nonce only after every one
 * of its bytes was written; with a constant (0, say) a word that arrived in
 * part could equal a nonce that shares its other part. */
static inline void kvnixl_cell_poison(int64_t *cell, int64_t nonce) {
    kvnixl_word_store(cell, ~nonce);
}

/* All 64 bits count: half a word proves nothing. */
static inline int kvnixl_cell_holds(const int64_t *cell, int64_t nonce) {
    return kvnixl_word_load(cell) == nonce;
}

#endif /* KVNIXL_SLOTS_H */
