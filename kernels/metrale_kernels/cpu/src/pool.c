/* One pool per process. Callers are served one after another; the caller works too.
 *
 * A worker spins for a bounded time after a job, because the operations of a step follow each other within microseconds, and
 * then sleeps on a condition variable: the event loop needs these cores as well. */
#define _GNU_SOURCE
#include "common.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPIN_NS 30000
#define MAX_SCRATCH 8

static pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t state = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_arrived = PTHREAD_COND_INITIALIZER;
static pthread_t workers[MAX_THREADS];
static int64_t worker_count = 0;
static int sleeping = 0;
static pid_t owner = 0;

/* A job is done when its tasks are done; nobody waits for a worker that slept through it. So a worker may come late, when the
 * next job is already there. What it takes is a ticket that says to which job it belongs and how many tasks that has
 * (generation, count, index in one word); a valid ticket keeps its job alive until it is worked off, an invalid one is dropped
 * without a look at the job. */
#define INDEX_BITS 24
#define COUNT_BITS 24
#define MAX_TASKS ((1 << 23) - 1)
#define JOBS 4

static struct { task_fn run; void *context; _Atomic int64_t done; } jobs[JOBS];
static _Atomic uint64_t next_ticket;
static _Atomic uint64_t generation;
static _Atomic int stopping;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void take_tasks(void) {
    for (;;) {
        uint64_t ticket = atomic_fetch_add(&next_ticket, 1);
        uint64_t index = ticket & ((1 << INDEX_BITS) - 1), count = (ticket >> INDEX_BITS) & ((1 << COUNT_BITS) - 1);
        if (index >= count) return;
        uint64_t job = (ticket >> (INDEX_BITS + COUNT_BITS)) % JOBS;
        jobs[job].run(jobs[job].context, (int64_t)index);
        atomic_fetch_add(&jobs[job].done, 1);
    }
}

static void wait_for_generation(uint64_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load(&generation) != seen) return;
            relax();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&state);
    sleeping++;
    while (atomic_load(&generation) == seen) pthread_cond_wait(&work_arrived, &state);
    sleeping--;
    pthread_mutex_unlock(&state);
}

static void *worker(void *first_generation) {
    uint64_t seen = (uint64_t)(uintptr_t)first_generation;
    for (;;) {
        wait_for_generation(seen);
        seen = atomic_load(&generation);
        if (atomic_load(&stopping)) return NULL;
        take_tasks();
    }
}

static void wake(void) {
    pthread_mutex_lock(&state);
    atomic_fetch_add(&generation, 1);
    if (sleeping) pthread_cond_broadcast(&work_arrived);
    pthread_mutex_unlock(&state);
}

static void stop_workers(void) {
    if (owner == getpid() && worker_count) {
        atomic_store(&stopping, 1);
        wake();
        for (int64_t i = 0; i < worker_count; i++) pthread_join(workers[i], NULL);
    }
    /* After a fork the threads exist in the parent only. */
    atomic_store(&stopping, 0);
    worker_count = 0;
}

void pool_set_threads(int64_t count) {
    if (count < 1) count = 1;
    if (count > MAX_THREADS) count = MAX_THREADS;
    pthread_mutex_lock(&callers);
    if (owner != getpid() || worker_count != count - 1) {
        stop_workers();
        owner = getpid();
        void *seen = (void *)(uintptr_t)atomic_load(&generation);
        while (worker_count < count - 1) {
            if (pthread_create(&workers[worker_count], NULL, worker, seen)) break;
            worker_count++;
        }
    }
    pthread_mutex_unlock(&callers);
}

int64_t pool_threads(void) { return 1 + worker_count; }

void pool_run(task_fn run, void *context, int64_t count) {
    if (count <= 0) return;
    if (count > MAX_TASKS) abort();
    pthread_mutex_lock(&callers);
    if (count == 1 || worker_count == 0 || owner != getpid()) {
        for (int64_t task = 0; task < count; task++) run(context, task);
    } else {
        uint64_t number = atomic_load(&generation) + 1, job = number % JOBS;
        jobs[job].run = run;
        jobs[job].context = context;
        atomic_store(&jobs[job].done, 0);
        uint64_t tag = number & 0xFFFF;
        atomic_store(&next_ticket, tag << (INDEX_BITS + COUNT_BITS) | (uint64_t)count << INDEX_BITS);
        wake();
        take_tasks();
        /* A worker may have been descheduled in the middle of a task: spin shortly, then let others run. */
        for (int64_t spins = 0; atomic_load(&jobs[job].done) != count; spins++) {
            if (spins < 2000) relax();
            else sched_yield();
        }
    }
    pthread_mutex_unlock(&callers);
}

void *thread_scratch(int which, size_t bytes) {
    static __thread struct { void *memory; size_t bytes; } kept[MAX_SCRATCH];
    if (kept[which].bytes < bytes) {
        free(kept[which].memory);
        size_t rounded = (bytes + 4095) / 4096 * 4096;
        kept[which].memory = aligned_alloc(64, rounded);
        kept[which].bytes = kept[which].memory ? rounded : 0;
        if (!kept[which].memory) abort();
    }
    return kept[which].memory;
}

/* What this library was compiled for. */
const char *kernel_instructions(void) {
#if defined(METRALE_AVX512_BF16)
    return "avx512-bf16";
#elif defined(METRALE_AVX512)
    return "avx512";
#else
    return "portable";
#endif
}
