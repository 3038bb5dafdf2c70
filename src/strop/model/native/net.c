#include "net.h"

#include <stdlib.h>

typedef struct {
    float *at;
    size_t used;
} carve;

/* First pass with at == NULL counts, second pass hands out. */
static float *take(carve *c, long floats) {
    float *r = c->at ? c->at + c->used : NULL;
    c->used += (size_t)pad16(floats);
    return r;
}

static void carve_weights(net *n, carve *c) {
    const net_config *f = &n->c;
    n->embed = take(c, f->vocab * n->Dp);
    n->head = take(c, n->Vp * f->hidden);
    n->norm = take(c, n->Dp);
    n->head_t = f->trains ? take(c, n->Dp * f->vocab) : NULL;
    for (int i = 0; i < f->layers; i++) {
        layer_weights *w = &n->layer[i];
        w->qkv = take(c, n->Nqkv * f->hidden);
        w->o = take(c, n->Dp * n->Hq);
        w->router = take(c, n->Ep * f->hidden);
        w->gate_up = take(c, f->experts * 2 * n->Fp * f->hidden);
        w->down = take(c, f->experts * n->Dp * f->expert_size);
        w->q_norm = take(c, n->Cp);
        w->k_norm = take(c, n->Cp);
        w->input_norm = take(c, n->Dp);
        w->post_norm = take(c, n->Dp);
        if (!f->trains) continue;
        w->qkv_t = take(c, n->Dp * n->Nqkv);
        w->o_t = take(c, n->Hq * f->hidden);
        w->router_t = take(c, n->Dp * f->experts);
        w->gate_up_t = take(c, f->experts * n->Dp * 2 * n->Fp);
        w->down_t = take(c, f->experts * n->Fp * f->hidden);
    }
}

void strop_net_free(net *n) {
    if (!n) return;
    pool_free(n->workers);
    free(n->slab);
    free(n->layer);
    free(n->cos);
    free(n->sin);
    free(n->buffer);
    free(n->free_tape);
    free(n);
}

net *strop_net_new(const net_config *config, int threads) {
    net *n = calloc(1, sizeof *n);
    if (!n) return NULL;
    n->c = *config;
    n->Dp = pad16(config->hidden);
    n->Cp = pad16(config->head_dim);
    n->Ep = pad16(config->experts);
    n->Fp = pad16(config->expert_size);
    n->Vp = pad16(config->vocab);
    n->Hq = config->heads * n->Cp;
    n->Nqkv = (config->heads + 2 * config->kv_heads) * n->Cp;
    n->scale = 1.0f / sqrtf((float)config->head_dim);
    n->layer = calloc((size_t)config->layers, sizeof *n->layer);
    n->workers = pool_new(threads);
    carve c = {NULL, 0};
    if (n->layer) carve_weights(n, &c);
    n->slab = big_alloc(c.used * sizeof(float));
    if (!n->layer || !n->workers || !n->slab) {
        strop_net_free(n);
        return NULL;
    }
    memset(n->slab, 0, c.used * sizeof(float));
    c = (carve){n->slab, 0};
    carve_weights(n, &c);
    return n;
}

int strop_net_threads(const net *n) { return pool_threads(n->workers); }

/* One head-wise padded copy of a projection: rows of head h go to h*Cp. */
static void pad_heads(const net *n, const float *w, long heads, float *out) {
    for (long h = 0; h < heads; h++)
        memcpy(out + h * n->Cp * n->c.hidden, w + h * n->c.head_dim * n->c.hidden, sizeof(float) * (size_t)(n->c.head_dim * n->c.hidden));
}

static void pack_attention(net *n, layer_weights *w, const raw_layer *raw, float *room) {
    const net_config *c = &n->c;
    memset(room, 0, sizeof(float) * (size_t)(n->Nqkv * c->hidden));
    pad_heads(n, raw->q, c->heads, room);
    pad_heads(n, raw->k, c->kv_heads, room + n->Hq * c->hidden);
    pad_heads(n, raw->v, c->kv_heads, room + (n->Hq + c->kv_heads * n->Cp) * c->hidden);
    pack_transposed(room, c->hidden, n->Nqkv, c->hidden, w->qkv);
    if (c->trains) pack_plain(room, c->hidden, n->Nqkv, c->hidden, w->qkv_t);
    memset(room, 0, sizeof(float) * (size_t)(n->Hq * c->hidden));
    for (long d = 0; d < c->hidden; d++)
        for (long h = 0; h < c->heads; h++)
            memcpy(room + d * n->Hq + h * n->Cp, raw->o + (d * c->heads + h) * c->head_dim, sizeof(float) * (size_t)c->head_dim);
    pack_transposed(room, n->Hq, c->hidden, n->Hq, w->o);
    if (c->trains) pack_plain(room, n->Hq, c->hidden, n->Hq, w->o_t);
}

static void pack_expert(net *n, layer_weights *w, const raw_layer *raw, long e) {
    const net_config *c = &n->c;
    long D = c->hidden, F = c->expert_size, half = n->Fp * D;
    const float *gate = raw->gate_up + e * 2 * F * D, *up = gate + F * D, *down = raw->down + e * D * F;
    pack_transposed(gate, D, F, D, w->gate_up + e * 2 * half);
    pack_transposed(up, D, F, D, w->gate_up + e * 2 * half + half);
    pack_transposed(down, F, D, F, w->down + e * n->Dp * F);
    if (!c->trains) return;
    /* Backward sums over 2Fp rows; rows that pad the width stay zero from the start. */
    for (long p = 0; p * LANES < D; p++) {
        float *panel = w->gate_up_t + (e * n->Dp + p * LANES) * 2 * n->Fp;
        for (long i = 0; i < F; i++)
            for (long j = 0; j < LANES && p * LANES + j < D; j++) {
                panel[i * LANES + j] = gate[i * D + p * LANES + j];
                panel[(n->Fp + i) * LANES + j] = up[i * D + p * LANES + j];
            }
    }
    pack_plain(down, F, D, F, w->down_t + e * n->Fp * D);
}

typedef struct {
    net *n;
    const raw_weights *raw;
} load_job;

static void load_task(void *context, long task, int thread) {
    load_job *job = context;
    net *n = job->n;
    const net_config *c = &n->c;
    if (task == 0) {
        const float *head = c->tied ? job->raw->embed : job->raw->head;
        for (long t = 0; t < c->vocab; t++)
            memcpy(n->embed + t * n->Dp, job->raw->embed + t * c->hidden, sizeof(float) * (size_t)c->hidden);
        memcpy(n->norm, job->raw->norm, sizeof(float) * (size_t)c->hidden);
        pack_transposed(head, c->hidden, c->vocab, c->hidden, n->head);
        if (c->trains) pack_plain(head, c->hidden, c->vocab, c->hidden, n->head_t);
        return;
    }
    long index = (task - 1) / (c->experts + 1), part = (task - 1) % (c->experts + 1);
    layer_weights *w = &n->layer[index];
    const raw_layer *raw = &job->raw->layers[index];
    if (part < c->experts) {
        pack_expert(n, w, raw, part);
        return;
    }
    pack_attention(n, w, raw, pool_scratch(n->workers, thread));
    pack_transposed(raw->router, c->hidden, c->experts, c->hidden, w->router);
    if (c->trains) pack_plain(raw->router, c->hidden, c->experts, c->hidden, w->router_t);
    memcpy(w->q_norm, raw->q_norm, sizeof(float) * (size_t)c->head_dim);
    memcpy(w->k_norm, raw->k_norm, sizeof(float) * (size_t)c->head_dim);
    memcpy(w->input_norm, raw->input_norm, sizeof(float) * (size_t)c->hidden);
    memcpy(w->post_norm, raw->post_norm, sizeof(float) * (size_t)c->hidden);
}

/* Pack the weights; returns 0, or -1 when memory is exhausted. */
int strop_net_load(net *n, const raw_weights *raw) {
    if (pool_reserve(n->workers, sizeof(float) * (size_t)(n->Nqkv * n->Dp))) return -1;
    load_job job = {n, raw};
    pool_run(n->workers, load_task, &job, 1 + (long)n->c.layers * (n->c.experts + 1));
    return 0;
}

/* Rotation tables, cosine and sine float32 [positions][C/2]. Returns 0, or -1 when memory is exhausted. */
int strop_net_rope(net *n, const float *cosine, const float *sine, long positions) {
    size_t bytes = sizeof(float) * (size_t)(positions * (n->c.head_dim / 2));
    float *c = malloc(bytes), *s = malloc(bytes);
    if (!c || !s) {
        free(c);
        free(s);
        return -1;
    }
    memcpy(c, cosine, bytes);
    memcpy(s, sine, bytes);
    free(n->cos);
    free(n->sin);
    n->cos = c;
    n->sin = s;
    n->max_positions = positions;
    return 0;
}
