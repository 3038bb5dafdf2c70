#include "net.h"

/* e[j] = exp(logits[j] - top) for all experts. */
void router_exponentials(const net *n, const float *logits, float top, float *e) {
    for (long j = 0; j < n->Ep; j += LANES) store16(e + j, exp16(sub16(load16(logits + j), set16(top))));
}

/* Chosen experts of one row, ascending, ties to the lower id, and their weights. Forced ids replace the choice, never the scores. */
void route_row(const net *n, const float *logits, const int64_t *forced, int32_t *ids, int32_t *natural, float *weight) {
    const net_config *c = &n->c;
    uint8_t taken[MAX_EXPERTS] = {0};
    for (int k = 0; k < c->top_k; k++) {
        int best = -1;
        for (int e = 0; e < c->experts; e++)
            if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
        taken[best] = 1;
    }
    for (int e = 0, k = 0; e < c->experts; e++)
        if (taken[e]) ids[k++] = e;
    if (natural) memcpy(natural, ids, sizeof(int32_t) * (size_t)c->top_k);
    for (int k = 0; forced && k < c->top_k; k++) ids[k] = (int32_t)forced[k];

    float top = logits[c->norm_topk ? ids[0] : 0];
    for (int k = 0; k < (c->norm_topk ? c->top_k : c->experts); k++) {
        float x = logits[c->norm_topk ? ids[k] : k];
        top = x > top ? x : top;
    }
    float e[MAX_EXPERTS], sum = 0.0f;
    router_exponentials(n, logits, top, e);
    for (int k = 0; k < (c->norm_topk ? c->top_k : c->experts); k++) sum += e[c->norm_topk ? ids[k] : k];
    for (int k = 0; k < c->top_k; k++) weight[k] = e[ids[k]] / sum;
}

/* Counting sort of (row, choice) pairs by expert; rows keep their order within an expert. */
void group_by_expert(const net *n, long rows, const uint8_t *active, layer_state *s) {
    long E = n->c.experts, K = n->c.top_k;
    memset(s->starts, 0, sizeof(int64_t) * (size_t)(E + 1));
    for (long r = 0; r < rows; r++)
        for (long k = 0; k < K && (!active || active[r]); k++) s->starts[s->ids[r * K + k] + 1]++;
    for (long e = 0; e < E; e++) s->starts[e + 1] += s->starts[e];
    for (long r = 0; r < rows; r++)
        for (long k = 0; k < K; k++) {
            if (active && !active[r]) {
                s->slot[r * K + k] = -1;
                continue;
            }
            int64_t at = s->starts[s->ids[r * K + k]]++;
            s->slot[r * K + k] = (int32_t)at;
            s->order[at] = (int32_t)(r * K + k);
        }
    for (long e = E; e > 0; e--) s->starts[e] = s->starts[e - 1];
    s->starts[0] = 0;
}

long expert_tasks(const net *n, const layer_state *s, long chunk) {
    long tasks = 0;
    for (long e = 0; e < n->c.experts; e++) tasks += (s->starts[e + 1] - s->starts[e] + chunk - 1) / chunk;
    return tasks;
}

long expert_task(const net *n, const layer_state *s, long chunk, long task, long *first, long *count) {
    for (long e = 0; e < n->c.experts; e++) {
        long size = s->starts[e + 1] - s->starts[e], parts = (size + chunk - 1) / chunk;
        if (task < parts) {
            *first = s->starts[e] + task * chunk;
            *count = size - task * chunk < chunk ? size - task * chunk : chunk;
            return e;
        }
        task -= parts;
    }
    return -1;
}

/* out = silu(gate) * up with silu(g) = g / (1 + exp(-g)). */
void gated_row(const float *gate_up, long padded, float *out) {
    v16 one = set16(1.0f), zero = set16(0.0f);
    for (long f = 0; f < padded; f += LANES) {
        v16 g = load16(gate_up + f), u = load16(gate_up + padded + f);
        store16(out + f, mul16(div16(g, add16(one, exp16(sub16(zero, g)))), u));
    }
}

typedef struct {
    net *n;
    int layer;
    layer_state *s;
} expert_job;

static void expert_forward_task(void *context, long task, int thread) {
    expert_job *job = context;
    net *n = job->n;
    layer_state *s = job->s;
    long D = n->c.hidden, F = n->c.expert_size, Dp = n->Dp, Fp = n->Fp, first, count;
    long e = expert_task(n, s, ROW_BLOCK, task, &first, &count);
    const layer_weights *w = &n->layer[job->layer];
    float *x = pool_scratch(n->workers, thread), *hidden = x + ROW_BLOCK * Dp;
    float *gate_up = s->gate_up ? s->gate_up + first * 2 * Fp : hidden + ROW_BLOCK * Fp;
    for (long i = 0; i < count; i++) memcpy(x + i * Dp, s->normed + s->order[first + i] / n->c.top_k * Dp, sizeof(float) * (size_t)Dp);
    gemm(count, 2 * Fp / LANES, D, x, Dp, w->gate_up + e * 2 * Fp * D, LANES, D * LANES, gate_up, 2 * Fp, STORE);
    for (long i = 0; i < count; i++) gated_row(gate_up + i * 2 * Fp, Fp, hidden + i * Fp);
    gemm(count, Dp / LANES, F, hidden, Fp, w->down + e * Dp * F, LANES, F * LANES, s->out + first * Dp, Dp, STORE);
}

void experts_forward(net *n, int layer, layer_state *s) {
    expert_job job = {n, layer, s};
    pool_run(n->workers, expert_forward_task, &job, expert_tasks(n, s, ROW_BLOCK));
}
