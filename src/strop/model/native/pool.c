#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

/* Waiting threads look this often before they sleep: about 30 microseconds. Longer spinning steals the cores of others. */
#define SPINS 800
/* state: generation (24 bits) | tasks (20 bits) | next task (20 bits), one word so that a late thread can't mix two phases. */
#define BITS 20
#define MASK ((1u << BITS) - 1)

struct pool {
    int threads;
    pid_t owner;
    pthread_t *ids;
    void **scratch;
    size_t scratch_bytes;
    task_fn fn;
    void *context;
    _Atomic uint64_t state;
    _Atomic long finished;
    _Atomic int sleepers, caller_sleeps, stop;
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
};

typedef struct {
    pool *p;
    int thread;
} worker_arg;

void *big_alloc(size_t bytes) {
    size_t huge = (size_t)2 << 20, unit = bytes >= huge ? huge : 64;
    size_t room = (bytes + unit - 1) / unit * unit;
    void *p = aligned_alloc(unit, room ? room : unit);
#if defined(__linux__)
    if (p && unit == huge) madvise(p, room, MADV_HUGEPAGE);
#endif
    return p;
}

unsigned pool_enter(void) {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return saved;
#else
    return 0;
#endif
}

void pool_leave(unsigned saved) {
#if defined(__x86_64__)
    _mm_setcsr(saved);
#else
    (void)saved;
#endif
}

static void take_tasks(pool *p, int thread) {
    for (;;) {
        uint64_t s = atomic_load(&p->state);
        uint64_t next = s & MASK, tasks = (s >> BITS) & MASK;
        if (next >= tasks) return;
        if (!atomic_compare_exchange_weak(&p->state, &s, s + 1)) continue;
        p->fn(p->context, (long)next, thread);
        if (atomic_fetch_add(&p->finished, 1) + 1 == (long)tasks && atomic_load(&p->caller_sleeps)) {
            pthread_mutex_lock(&p->mutex);
            pthread_cond_signal(&p->done);
            pthread_mutex_unlock(&p->mutex);
        }
    }
}

static void *work(void *argument) {
    worker_arg a = *(worker_arg *)argument;
    free(argument);
    pool *p = a.p;
    pool_enter();
    uint64_t seen = 0;
    while (!atomic_load(&p->stop)) {
        for (int i = 0; i < SPINS && atomic_load(&p->state) >> (2 * BITS) == seen; i++) PAUSE();
        if (atomic_load(&p->state) >> (2 * BITS) == seen) {
            pthread_mutex_lock(&p->mutex);
            atomic_fetch_add(&p->sleepers, 1);
            while (atomic_load(&p->state) >> (2 * BITS) == seen && !atomic_load(&p->stop)) pthread_cond_wait(&p->wake, &p->mutex);
            atomic_fetch_sub(&p->sleepers, 1);
            pthread_mutex_unlock(&p->mutex);
        }
        seen = atomic_load(&p->state) >> (2 * BITS);
        take_tasks(p, a.thread);
    }
    return NULL;
}

pool *pool_new(int threads) {
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->owner = getpid();
    p->ids = calloc((size_t)threads, sizeof *p->ids);
    p->scratch = calloc((size_t)threads, sizeof *p->scratch);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->done, NULL);
    p->threads = 1;
    for (int i = 1; p->ids && p->scratch && i < threads; i++) {
        worker_arg *a = malloc(sizeof *a);
        if (!a) break;
        *a = (worker_arg){p, i};
        if (pthread_create(&p->ids[i], NULL, work, a)) {
            free(a);
            break;
        }
        p->threads++;
    }
    return p;
}

void pool_free(pool *p) {
    if (!p) return;
    if (p->owner == getpid()) { /* a forked child has no workers to join */
        pthread_mutex_lock(&p->mutex);
        atomic_store(&p->stop, 1);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->mutex);
        for (int i = 1; i < p->threads; i++) pthread_join(p->ids[i], NULL);
    }
    for (int i = 0; i < p->threads; i++) free(p->scratch[i]);
    free(p->scratch);
    free(p->ids);
    free(p);
}

int pool_threads(const pool *p) { return p->threads; }

int pool_reserve(pool *p, size_t bytes) {
    if (bytes <= p->scratch_bytes) return 0;
    bytes = (bytes + 4095) / 4096 * 4096;
    for (int i = 0; i < p->threads; i++) {
        free(p->scratch[i]);
        p->scratch[i] = aligned_alloc(64, bytes);
        if (!p->scratch[i]) {
            p->scratch_bytes = 0;
            return -1;
        }
    }
    p->scratch_bytes = bytes;
    return 0;
}

void *pool_scratch(pool *p, int thread) { return p->scratch[thread]; }

void pool_run(pool *p, task_fn fn, void *context, long tasks) {
    if (p->threads == 1 || tasks <= 1 || tasks > (long)MASK - 64 || p->owner != getpid()) {
        for (long i = 0; i < tasks; i++) fn(context, i, 0);
        return;
    }
    p->fn = fn;
    p->context = context;
    atomic_store(&p->finished, 0);
    uint64_t generation = (atomic_load(&p->state) >> (2 * BITS)) + 1;
    atomic_store(&p->state, (generation << (2 * BITS)) | ((uint64_t)tasks << BITS));
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->mutex);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->mutex);
    }
    take_tasks(p, 0);
    for (int i = 0; i < SPINS && atomic_load(&p->finished) < tasks; i++) PAUSE();
    if (atomic_load(&p->finished) == tasks) return;
    pthread_mutex_lock(&p->mutex);
    atomic_store(&p->caller_sleeps, 1);
    while (atomic_load(&p->finished) < tasks) pthread_cond_wait(&p->done, &p->mutex);
    atomic_store(&p->caller_sleeps, 0);
    pthread_mutex_unlock(&p->mutex);
}
