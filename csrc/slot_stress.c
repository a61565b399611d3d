/* The lease-slot protocol between threads: an owner gives blocks away and takes
 * them back as fast as it can, readers copy them and then look at the slot.
 *
 *   slot_stress [--seconds S] [--readers N] [--seed X] [--broken free-first|slot-first]
 *
 * Exit status 0: reads were accepted, races were caught, no accepted read holds
 * a foreign word. 1: a foreign word was accepted (what a broken order is for).
 * 2: usage. 3: nothing was proven.
 *
 * Owner and readers use the same accesses and barriers as the library. A slot is
 * fetched in two halves, at different moments, as the worst NIC would do it.
 */
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvnixl_fence.h"
#include "kvnixl_slots.h"

enum { NUM_SLOTS = 4, BLOCK_WORDS = 48, MAX_READERS = 16 };

enum broken { NOTHING, FREE_FIRST, SLOT_FIRST };

/* A line of its own for each, as slots in different cache lines move apart. */
struct lease {
    _Alignas(64) int64_t slot;
    _Alignas(64) int64_t offered; /* the nonce, as a reader hears of it */
    _Alignas(64) int64_t block[BLOCK_WORDS];
};

static struct lease leases[NUM_SLOTS];
static int stop;
static enum broken broken = NOTHING;
static uint64_t seed = 1;

struct reader {
    pthread_t thread;
    uint64_t dice;
    uint64_t accepted;
    uint64_t caught;  /* rejected, and the copy did hold a foreign word */
    uint64_t refused; /* rejected although the copy is right: the lease ended meanwhile */
    uint64_t foreign; /* accepted with a foreign word */
};

static uint64_t roll(uint64_t *dice) { /* xorshift64 */
    *dice ^= *dice << 13;
    *dice ^= *dice >> 7;
    *dice ^= *dice << 17;
    return *dice;
}

static void dawdle(uint64_t *dice) {
    uint64_t r = roll(dice) % 16;
    if (r == 0)
        sched_yield();
    else
        for (volatile uint64_t i = 0; i < r * 8; i++) {
        }
}

static void fill(int64_t *block, int64_t value) {
    for (int i = 0; i < BLOCK_WORDS; i++)
        kvnixl_word_store(&block[i], value);
}

static void *own(void *unused) {
    uint64_t dice = seed;
    /* Soon at the place where the low half of the nonces wraps. */
    int64_t nonce = (int64_t)((roll(&dice) >> 34) << 32 | 0xFFFFFF00);
    (void)unused;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        struct lease *lease = &leases[roll(&dice) % NUM_SLOTS];
        if (broken == FREE_FIRST) {
            fill(lease->block, -1);
            dawdle(&dice);
        }
        kvnixl_word_store(&lease->slot, 0);
        kvnixl_revoke_fence();
        fill(lease->block, -1); /* somebody else's bytes */
        dawdle(&dice);
        nonce = kvnixl_next_nonce(nonce);
        fill(lease->block, nonce);
        kvnixl_publish_fence();
        kvnixl_word_store(&lease->slot, nonce);
        __atomic_store_n(&lease->offered, nonce, __ATOMIC_RELEASE);
        dawdle(&dice);
    }
    return NULL;
}

typedef uint32_t __attribute__((may_alias)) half;

/* The READ of a slot into a cell. */
static void fetch(const int64_t *slot, int64_t *cell, uint64_t *dice) {
    const half *from = (const half *)slot;
    half *to = (half *)cell;
    int first = (int)(roll(dice) % 2);
    __atomic_store_n(&to[first], __atomic_load_n(&from[first], __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    dawdle(dice);
    __atomic_store_n(&to[1 - first], __atomic_load_n(&from[1 - first], __ATOMIC_RELAXED),
                     __ATOMIC_RELAXED);
}

static void *read_blocks(void *argument) {
    struct reader *me = argument;
    int64_t copy[BLOCK_WORDS];
    int64_t cell;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        const struct lease *lease = &leases[roll(&me->dice) % NUM_SLOTS];
        int64_t nonce = __atomic_load_n(&lease->offered, __ATOMIC_ACQUIRE);
        if (nonce == 0)
            continue;
        kvnixl_cell_poison(&cell, nonce);
        if (broken == SLOT_FIRST)
            fetch(&lease->slot, &cell, &me->dice);
        for (int i = 0; i < BLOCK_WORDS; i++) {
            copy[i] = kvnixl_word_load(&lease->block[i]);
            if (i % 16 == 0)
                dawdle(&me->dice);
        }
        kvnixl_observe_fence();
        if (broken != SLOT_FIRST)
            fetch(&lease->slot, &cell, &me->dice);
        bool right = true;
        for (int i = 0; i < BLOCK_WORDS; i++)
            right &= copy[i] == nonce;
        if (!kvnixl_cell_holds(&cell, nonce))
            *(right ? &me->refused : &me->caught) += 1;
        else
            *(right ? &me->accepted : &me->foreign) += 1;
    }
    return NULL;
}

static int usage(const char *name) {
    fprintf(
        stderr,
        "usage: %s [--seconds S] [--readers 1-%d] [--seed X] [--broken free-first|slot-first]\n",
        name, MAX_READERS);
    return 2;
}

int main(int argc, char **argv) {
    double seconds = 2.0;
    int num_readers = 2;
    static struct reader readers[MAX_READERS];
    struct reader sum = {0};
    pthread_t owner;

    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value == NULL)
            return usage(argv[0]);
        if (strcmp(argv[i], "--seconds") == 0)
            seconds = atof(value);
        else if (strcmp(argv[i], "--readers") == 0)
            num_readers = atoi(value);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(value, NULL, 0);
        else if (strcmp(argv[i], "--broken") == 0 && strcmp(value, "free-first") == 0)
            broken = FREE_FIRST;
        else if (strcmp(argv[i], "--broken") == 0 && strcmp(value, "slot-first") == 0)
            broken = SLOT_FIRST;
        else
            return usage(argv[0]);
    }
    if (num_readers < 1 || num_readers > MAX_READERS || seed == 0 || !(seconds > 0))
        return usage(argv[0]);

    if (pthread_create(&owner, NULL, own, NULL) != 0)
        return 3;
    for (int i = 0; i < num_readers; i++) {
        readers[i].dice = seed + 0x9E3779B97F4A7C15 * (uint64_t)(i + 1);
        if (pthread_create(&readers[i].thread, NULL, read_blocks, &readers[i]) != 0)
            return 3;
    }
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    pthread_join(owner, NULL);
    for (int i = 0; i < num_readers; i++) {
        pthread_join(readers[i].thread, NULL);
        sum.accepted += readers[i].accepted;
        sum.caught += readers[i].caught;
        sum.refused += readers[i].refused;
        sum.foreign += readers[i].foreign;
    }
    printf("accepted %llu, races caught %llu, refused although right %llu, foreign words accepted "
           "%llu\n",
           (unsigned long long)sum.accepted, (unsigned long long)sum.caught,
           (unsigned long long)sum.refused, (unsigned long long)sum.foreign);
    if (sum.foreign != 0)
        return 1;
    return sum.accepted != 0 && sum.caught != 0 ? 0 : 3;
}
