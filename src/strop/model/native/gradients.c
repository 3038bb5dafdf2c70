#include "tape.h"

#define OUT_ROWS 48  /* rows of a weight matrix that one task makes */
#define SUM_ROWS 192 /* tokens of one partial sum; partial sums are added in order */

size_t weight_scratch(const net *n) { return sizeof(float) * (size_t)(OUT_ROWS * (n->Hq > n->Dp ? n->Hq : n->Dp)); }

long weight_tasks(long rows) { return (rows + OUT_ROWS - 1) / OUT_ROWS; }

/* tile[count][width] = sum over rows of a[r, first + i] * b[r, j]. */
static void outer_sum(const backward_pass *p, const float *a, long lda, const float *b, long width, long first, long count, float *tile) {
    memset(tile, 0, sizeof(float) * (size_t)(count * width));
    for (long r = 0; r < p->t->b.rows; r += SUM_ROWS) {
        long rows = p->t->b.rows - r < SUM_ROWS ? p->t->b.rows - r : SUM_ROWS;
        gemm_t(count, width / LANES, rows, a + r * lda + first, lda, b + r * width, width, LANES, tile, width, ADD);
    }
}

void output_weight_task(backward_pass *p, long task, void *scratch) {
    const net *n = p->n;
    long first = task * OUT_ROWS, count = n->c.hidden - first < OUT_ROWS ? n->c.hidden - first : OUT_ROWS, C = n->c.head_dim;
    float *out = p->grads->layers[p->index].o, *tile = scratch;
    outer_sum(p, p->room.dx, n->Dp, p->t->layer[p->index].attn, n->Hq, first, count, tile);
    for (long i = 0; i < count; i++)
        for (long h = 0; h < n->c.heads; h++)
            memcpy(out + ((first + i) * n->c.heads + h) * C, tile + i * n->Hq + h * n->Cp, sizeof(float) * (size_t)C);
}

void router_weight_task(backward_pass *p, long task, void *scratch) {
    const net *n = p->n;
    long first = task * OUT_ROWS, count = n->c.experts - first < OUT_ROWS ? n->c.experts - first : OUT_ROWS, D = n->c.hidden;
    float *out = p->grads->layers[p->index].router, *tile = scratch;
    outer_sum(p, p->room.d_logits, n->Ep, p->t->layer[p->index].normed, n->Dp, first, count, tile);
    for (long i = 0; i < count; i++) memcpy(out + (first + i) * D, tile + i * n->Dp, sizeof(float) * (size_t)D);
}

void qkv_weight_task(backward_pass *p, long task, void *scratch) {
    const net *n = p->n;
    long first = task * OUT_ROWS, count = n->Nqkv - first < OUT_ROWS ? n->Nqkv - first : OUT_ROWS, D = n->c.hidden, C = n->c.head_dim;
    const raw_layer *g = &p->grads->layers[p->index];
    float *tile = scratch;
    outer_sum(p, p->room.d_qkv, n->Nqkv, p->room.normed, n->Dp, first, count, tile);
    for (long i = 0; i < count; i++) {
        long head = (first + i) / n->Cp, c = (first + i) % n->Cp;
        if (c >= C) continue;
        float *out = g->q;
        if (head >= n->c.heads) {
            head -= n->c.heads;
            out = g->k;
            if (head >= n->c.kv_heads) {
                head -= n->c.kv_heads;
                out = g->v;
            }
        }
        memcpy(out + (head * C + c) * D, tile + i * n->Dp, sizeof(float) * (size_t)D);
    }
}

void sum_gains(const float *gains, long blocks, long stride, long dim, float *out) {
    for (long i = 0; i < dim; i++) {
        float sum = 0.0f;
        for (long b = 0; b < blocks; b++) sum += gains[b * stride + i];
        out[i] = sum;
    }
}
