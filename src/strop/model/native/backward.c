#include "tape.h"

#include <stdlib.h>

/* Gradient of norm_row. d_x is written (it may be d_out); d_gain is added to. */
void norm_row_backward(const float *x, const float *gain, const float *d_out, long dim, long padded, float eps, float *d_x, float *d_gain) {
    v16 square = set16(0.0f), product = set16(0.0f);
    for (long i = 0; i < padded; i += LANES) {
        v16 v = load16(x + i);
        square = fma16(v, v, square);
        product = fma16(mul16(load16(gain + i), load16(d_out + i)), v, product);
    }
    float inverse = 1.0f / sqrtf(sum_lanes(square) / (float)dim + eps);
    v16 scale = set16(inverse), pull = set16(-inverse * inverse * inverse * sum_lanes(product) / (float)dim);
    for (long i = 0; i < padded; i += LANES) {
        v16 v = load16(x + i), d = load16(d_out + i);
        store16(d_gain + i, fma16(d, mul16(v, scale), load16(d_gain + i)));
        store16(d_x + i, fma16(pull, v, mul16(mul16(d, load16(gain + i)), scale)));
    }
}

static void add_row(float *to, const float *from, long count) {
    for (long i = 0; i < count; i += LANES) store16(to + i, add16(load16(to + i), load16(from + i)));
}

/* Experts' input gradients and the router's to the residual stream before the experts, and to the attention's output. */
static void middle_task(void *context, long task, int thread) {
    (void)thread;
    backward_pass *p = context;
    net *n = p->n;
    const layer_state *s = &p->t->layer[p->index];
    const layer_weights *w = &n->layer[p->index];
    long Dp = n->Dp, K = n->c.top_k, R = p->t->b.rows, first = task * ROW_BLOCK, count = R - first < ROW_BLOCK ? R - first : ROW_BLOCK;
    float *gain = p->room.gains + task * Dp;
    memset(gain, 0, sizeof(float) * (size_t)Dp);
    memset(p->room.d_normed + first * Dp, 0, sizeof(float) * (size_t)(count * Dp));
    for (long r = first; r < first + count; r++) {
        float *d_logits = p->room.d_logits + r * n->Ep;
        for (long k = 0; k < K; k++) {
            long slot = s->slot[r * K + k];
            if (slot < 0)
                p->room.d_weight[r * K + k] = 0.0f;
            else
                add_row(p->room.d_normed + r * Dp, s->out + slot * Dp, Dp);
        }
        route_row_backward(n, s->logits + r * n->Ep, s->ids + r * K, s->weight + r * K, p->room.d_weight + r * K, d_logits);
        const float *extra = p->g_router ? p->g_router + (p->index * R + r) * n->c.experts : NULL;
        for (long e = 0; extra && e < n->c.experts; e++) d_logits[e] += extra[e];
    }
    gemm(count, Dp / LANES, n->c.experts, p->room.d_logits + first * n->Ep, n->Ep, w->router_t, LANES, n->c.experts * LANES,
         p->room.d_normed + first * Dp, Dp, ADD);
    for (long r = first; r < first + count; r++) {
        float *d = p->room.d_normed + r * Dp;
        norm_row_backward(s->mid + r * Dp, w->post_norm, d, n->c.hidden, Dp, n->c.eps, d, gain);
        add_row(p->room.dx + r * Dp, d, Dp);
    }
    gemm(count, n->Hq / LANES, n->c.hidden, p->room.dx + first * Dp, Dp, w->o_t, LANES, n->c.hidden * LANES, p->room.d_attn + first * n->Hq,
         n->Hq, STORE);
}

/* Attention of one stream and key-value head, then the weight gradients that need the stream before it is changed. */
static void attention_task(void *context, long task, int thread) {
    backward_pass *p = context;
    net *n = p->n;
    tape *t = p->t;
    void *scratch = pool_scratch(n->workers, thread);
    long attention = t->streams * n->c.kv_heads, output = weight_tasks(n->c.hidden);
    if (task < attention) {
        long stream = task / n->c.kv_heads;
        attend_backward(n, &t->b, p->index, &t->layer[p->index], p->room.d_attn, p->room.d_qkv, t->first[stream],
                        t->first[stream + 1] - t->first[stream], task % n->c.kv_heads, scratch);
    } else if (task < attention + output) {
        output_weight_task(p, task - attention, scratch);
    } else {
        router_weight_task(p, task - attention - output, scratch);
    }
}

/* Undo the rotation and the norm of one query or key head, in place. */
static void head_row_backward(const net *n, const float *raw, const float *gain, long position, float *d, float *d_gain) {
    long half = n->c.head_dim / 2;
    const float *c = n->cos + position * half, *s = n->sin + position * half;
    for (long i = 0; i < half; i++) {
        float a = d[i], b = d[i + half];
        d[i] = a * c[i] + b * s[i];
        d[i + half] = b * c[i] - a * s[i];
    }
    norm_row_backward(raw, gain, d, n->c.head_dim, n->Cp, n->c.eps, d, d_gain);
}

/* Projections and first norm: adds to the residual stream, leaves d_qkv before norm and rotation, and the norm's output. */
static void project_backward_task(void *context, long task, int thread) {
    (void)thread;
    backward_pass *p = context;
    net *n = p->n;
    const layer_state *s = &p->t->layer[p->index];
    const layer_weights *w = &n->layer[p->index];
    long Dp = n->Dp, Cp = n->Cp, R = p->t->b.rows, first = task * ROW_BLOCK, count = R - first < ROW_BLOCK ? R - first : ROW_BLOCK;
    float *q_gain = p->room.gains + task * (2 * Cp + Dp), *k_gain = q_gain + Cp, *gain = k_gain + Cp;
    memset(q_gain, 0, sizeof(float) * (size_t)(2 * Cp + Dp));
    for (long r = first; r < first + count; r++) {
        long at = r * n->Nqkv, position = p->t->positions[r];
        for (long h = 0; h < n->c.heads; h++)
            head_row_backward(n, s->raw + at + h * Cp, w->q_norm, position, p->room.d_qkv + at + h * Cp, q_gain);
        for (long g = 0; g < n->c.kv_heads; g++)
            head_row_backward(n, s->raw + at + n->Hq + g * Cp, w->k_norm, position, p->room.d_qkv + at + n->Hq + g * Cp, k_gain);
    }
    gemm(count, Dp / LANES, n->Nqkv, p->room.d_qkv + first * n->Nqkv, n->Nqkv, w->qkv_t, LANES, n->Nqkv * LANES,
         p->room.d_normed + first * Dp, Dp, STORE);
    for (long r = first; r < first + count; r++) {
        float *d = p->room.d_normed + r * Dp;
        norm_row(s->x + r * Dp, w->input_norm, n->c.hidden, Dp, n->c.eps, p->room.normed + r * Dp);
        norm_row_backward(s->x + r * Dp, w->input_norm, d, n->c.hidden, Dp, n->c.eps, d, gain);
        add_row(p->room.dx + r * Dp, d, Dp);
    }
}

static void qkv_task(void *context, long task, int thread) {
    backward_pass *p = context;
    qkv_weight_task(p, task, pool_scratch(p->n->workers, thread));
}

void layer_backward(backward_pass *p) {
    net *n = p->n;
    raw_layer *g = &p->grads->layers[p->index];
    long blocks = (p->t->b.rows + ROW_BLOCK - 1) / ROW_BLOCK, stride = 2 * n->Cp + n->Dp;
    experts_backward(p);
    pool_run(n->workers, middle_task, p, blocks);
    sum_gains(p->room.gains, blocks, n->Dp, n->c.hidden, g->post_norm);
    pool_run(n->workers, attention_task, p, p->t->streams * n->c.kv_heads + weight_tasks(n->c.hidden) + weight_tasks(n->c.experts));
    pool_run(n->workers, project_backward_task, p, blocks);
    sum_gains(p->room.gains, blocks, stride, n->c.head_dim, g->q_norm);
    sum_gains(p->room.gains + n->Cp, blocks, stride, n->c.head_dim, g->k_norm);
    sum_gains(p->room.gains + 2 * n->Cp, blocks, stride, n->c.hidden, g->input_norm);
    pool_run(n->workers, qkv_task, p, weight_tasks(n->Nqkv));
}

/* Embedding rows: every task adds some columns of all tokens, in order. */
static void embed_task(void *context, long task, int thread) {
    (void)thread;
    backward_pass *p = context;
    const net *n = p->n;
    for (long r = 0; r < p->t->b.rows; r++) {
        float *to = p->room.d_embed + p->t->tokens[r] * n->Dp + task * LANES;
        store16(to, add16(load16(to), load16(p->room.dx + r * n->Dp + task * LANES)));
    }
}

static size_t lay_out(const net *n, const tape *t, char *at, gradient_room *m) {
    long R = t->b.rows, W = t->b.wants, rows = R > W ? R : W, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    struct {
        void **field;
        long bytes;
    } parts[] = {
        {(void **)&m->dx, 4 * R * n->Dp},
        {(void **)&m->d_normed, 4 * R * n->Dp},
        {(void **)&m->normed, 4 * R * n->Dp},
        {(void **)&m->d_attn, 4 * R * n->Hq},
        {(void **)&m->d_qkv, 4 * R * n->Nqkv},
        {(void **)&m->d_logits, 4 * R * n->Ep},
        {(void **)&m->d_weight, 4 * R * n->c.top_k},
        {(void **)&m->gains, 4 * blocks * (2 * n->Cp + n->Dp)},
        {(void **)&m->d_hidden, 4 * W * n->Dp},
        {(void **)&m->d_scores, 4 * HEAD_ROWS * n->Vp},
        {(void **)&m->d_embed, 4 * n->Vp * n->Dp},
        {(void **)&m->d_head, n->c.tied ? 0 : 4 * n->Vp * n->Dp},
        {(void **)&m->by_size, (long)sizeof(long) * n->c.experts},
    };
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].field = at ? at + used : NULL;
        used += ((size_t)parts[i].bytes + 63) / 64 * 64;
    }
    if (n->c.tied) m->d_head = m->d_embed;
    return used;
}

static void write_rows(const net *n, const float *from, float *to) {
    for (long v = 0; v < n->c.vocab; v++) memcpy(to + v * n->c.hidden, from + v * n->Dp, sizeof(float) * (size_t)n->c.hidden);
}

/* Gradients of  sum(g_logprob * logprob) + sum(g_entropy * entropy) + sum(g_router * router_logits)  into `grads`.
 * The tape is used up (release it). Returns 0, or -1 when memory is exhausted. */
int strop_train_backward(net *n, tape *t, const float *g_logprob, const float *g_entropy, const float *g_router, raw_weights *grads) {
    backward_pass p = {.n = n, .t = t, .g_logprob = g_logprob, .g_entropy = g_entropy, .g_router = g_router, .grads = grads};
    size_t bytes = lay_out(n, t, NULL, &p.room), scratch = attend_backward_scratch(n, t->longest), other = experts_backward_scratch(n);
    if (other > scratch) scratch = other;
    if (weight_scratch(n) > scratch) scratch = weight_scratch(n);
    if (bytes > n->buffer_bytes) {
        free(n->buffer);
        n->buffer = big_alloc(bytes);
        n->buffer_bytes = n->buffer ? bytes : 0;
    }
    if (!n->buffer || pool_reserve(n->workers, scratch)) return -1;
    lay_out(n, t, n->buffer, &p.room);
    unsigned saved = pool_enter();
    memset(p.room.dx, 0, sizeof(float) * (size_t)(t->b.rows * n->Dp));
    memset(p.room.d_embed, 0, sizeof(float) * (size_t)(n->Vp * n->Dp));
    memset(p.room.d_head, 0, sizeof(float) * (size_t)(n->Vp * n->Dp));
    head_backward(&p);
    for (p.index = n->c.layers - 1; p.index >= 0; p.index--) layer_backward(&p);
    pool_run(n->workers, embed_task, &p, n->Dp / LANES);
    write_rows(n, p.room.d_embed, grads->embed);
    if (!n->c.tied) write_rows(n, p.room.d_head, grads->head);
    pool_leave(saved);
    return 0;
}
