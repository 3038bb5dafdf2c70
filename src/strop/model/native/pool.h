/* A small thread pool that sleeps when idle: tasks of one phase are handed out by a counter, so which thread runs a task
 * varies, and nothing may depend on it. */
#ifndef STROP_POOL_H
#define STROP_POOL_H

#include <stddef.h>

typedef struct pool pool;
typedef void (*task_fn)(void *context, long task, int thread);

pool *pool_new(int threads);
void pool_free(pool *p);
int pool_threads(const pool *p);

/* Scratch of one thread: at least `bytes`, aligned to 64; contents don't survive the next pool_reserve.
 * Returns 0, or -1 when memory is exhausted. */
int pool_reserve(pool *p, size_t bytes);
void *pool_scratch(pool *p, int thread);

/* Run fn(context, 0 .. tasks-1), the caller takes part; returns when all are done. */
void pool_run(pool *p, task_fn fn, void *context, long tasks);

/* Memory for big arrays, on huge pages where the system has them: a third more bandwidth, and few page faults. Give it to free(). */
void *big_alloc(size_t bytes);

/* IEEE defaults for the calling thread (round to nearest, denormals kept); returns what to give to pool_leave. */
unsigned pool_enter(void);
void pool_leave(unsigned saved);

#endif
