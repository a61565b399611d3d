/* Ordering of index pairs into runs.
 *
 * NIXL merges two consecutive index pairs of a transfer into one descriptor if
 * both sides go on to the next block. A run is a maximal stretch of such pairs:
 * (dst, src), (dst + 1, src + 1), ... The lists hold indices in 0 .. 2**31 - 1.
 *
 * Sorting runs by destination leaves the fewest descriptors: destinations are
 * distinct, so (d, s) can merge only with (d + 1, s + 1), and sorting puts d and
 * d + 1 side by side. Every merge that any order allows happens.
 */
#ifndef KVNIXL_DESCS_H
#define KVNIXL_DESCS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int32_t dst;
    int32_t src;
    int32_t length;
} kvnixl_run_t;

static inline int kvnixl_continues(const int32_t *dst, const int32_t *src, ptrdiff_t i) {
    return dst[i] - dst[i - 1] == 1 && src[i] - src[i - 1] == 1;
}

/* The number of runs in the given order; 0 for n == 0. */
static inline ptrdiff_t kvnixl_count_runs(const int32_t *dst, const int32_t *src, ptrdiff_t n) {
    ptrdiff_t num_runs = n > 0;
    for (ptrdiff_t i = 1; i < n; i++) {
        num_runs += !kvnixl_continues(dst, src, i);
    }
    return num_runs;
}

static inline int kvnixl_is_ascending(const int32_t *values, ptrdiff_t n) {
    for (ptrdiff_t i = 1; i < n; i++) {
        if (values[i - 1] >= values[i]) {
            return 0;
        }
    }
    return 1;
}

/* Writes the runs of the given order. Needs n > 0 and room for kvnixl_count_runs() of them. */
static inline void kvnixl_find_runs(const int32_t *dst, const int32_t *src, ptrdiff_t n,
                                    kvnixl_run_t *runs) {
    kvnixl_run_t *run = runs;
    *run = (kvnixl_run_t){dst[0], src[0], 1};
    for (ptrdiff_t i = 1; i < n; i++) {
        if (kvnixl_continues(dst, src, i)) {
            run->length++;
        } else {
            *++run = (kvnixl_run_t){dst[i], src[i], 1};
        }
    }
}

/* Sorts by destination (radix sort, least significant byte first, as many bytes as the largest
 * destination has). Returns whichever of the two buffers holds the result. */
static inline kvnixl_run_t *kvnixl_sort_runs(kvnixl_run_t *runs, kvnixl_run_t *scratch,
                                             ptrdiff_t num_runs) {
    int32_t largest = 0;
    for (ptrdiff_t i = 0; i < num_runs; i++) {
        largest = runs[i].dst > largest ? runs[i].dst : largest;
    }
    for (int shift = 0; shift < 32 && largest >> shift > 0; shift += 8) {
        ptrdiff_t position[256] = {0};
        for (ptrdiff_t i = 0; i < num_runs; i++) {
            position[(runs[i].dst >> shift) & 0xff]++;
        }
        ptrdiff_t start = 0;
        for (int digit = 0; digit < 256; digit++) {
            ptrdiff_t count = position[digit];
            position[digit] = start;
            start += count;
        }
        for (ptrdiff_t i = 0; i < num_runs; i++) {
            scratch[position[(runs[i].dst >> shift) & 0xff]++] = runs[i];
        }
        kvnixl_run_t *sorted = scratch;
        scratch = runs;
        runs = sorted;
    }
    return runs;
}

/* Joins sorted runs that go on in each other, in place. Returns how many are left, or -1 if two
 * runs share a destination, which then is in *duplicate. Needs num_runs > 0. */
static inline ptrdiff_t kvnixl_join_runs(kvnixl_run_t *runs, ptrdiff_t num_runs,
                                         int32_t *duplicate) {
    kvnixl_run_t *last = runs;
    for (ptrdiff_t i = 1; i < num_runs; i++) {
        int64_t dst_step = (int64_t)runs[i].dst - last->dst;
        int64_t src_step = (int64_t)runs[i].src - last->src;
        if (dst_step < last->length) {
            *duplicate = runs[i].dst;
            return -1;
        }
        if (dst_step == last->length && src_step == last->length) {
            last->length += runs[i].length;
        } else {
            *++last = runs[i];
        }
    }
    return last - runs + 1;
}

/* The inverse of kvnixl_find_runs. */
static inline void kvnixl_write_runs(const kvnixl_run_t *runs, ptrdiff_t num_runs, int32_t *dst,
                                     int32_t *src) {
    for (ptrdiff_t r = 0; r < num_runs; r++) {
        for (int32_t i = 0; i < runs[r].length; i++) {
            *dst++ = runs[r].dst + i;
            *src++ = runs[r].src + i;
        }
    }
}

#endif /* KVNIXL_DESCS_H */
