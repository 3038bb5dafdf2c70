/* The network: sizes, packed weights, and what a forward pass reads and leaves.
 *
 * Shape legend (as in decoder.py): R rows, D hidden, H heads, G key-value heads, C head dim, E experts, K experts per token,
 * F expert width, L layers, V vocabulary, W rows whose logits are wanted. A "p" marks a size padded to 16; padding holds zeros.
 */
#ifndef STROP_NET_H
#define STROP_NET_H

#include "gemm.h"
#include "pool.h"

#define MAX_EXPERTS 1024 /* a multiple of 16 */
#define ROW_BLOCK 48     /* rows of one task; gradients of norm gains are summed by such blocks, so it must not depend on threads */

typedef struct {
    int32_t vocab, hidden, layers, heads, kv_heads, head_dim, experts, top_k, expert_size, norm_topk, tied, trains;
    float eps;
    int64_t kept_scores; /* bytes of vocabulary logits that a tape may keep; beyond it backward computes them again */
} net_config;

/* Raw weights in transformers' layout, row major; also the layout in which gradients are returned. */
typedef struct {
    float *q, *k, *v, *o, *q_norm, *k_norm, *input_norm, *post_norm, *router, *gate_up, *down;
} raw_layer;

typedef struct {
    float *embed, *head, *norm; /* head is NULL when tied */
    raw_layer *layers;
} raw_weights;

typedef struct {
    float *qkv, *o, *router, *gate_up, *down;           /* for X W^T: forward */
    float *qkv_t, *o_t, *router_t, *gate_up_t, *down_t; /* for Y W: backward, only when training */
    float *q_norm, *k_norm, *input_norm, *post_norm;    /* padded with zeros */
} layer_weights;

typedef struct net {
    net_config c;
    long Dp, Cp, Ep, Fp, Vp, Hq, Nqkv; /* Hq = H*Cp, Nqkv = (H + 2G)*Cp */
    float scale;                       /* 1 / sqrt(C) */
    float *embed, *head, *head_t, *norm;
    layer_weights *layer;
    float *cos, *sin; /* [max_positions][C/2] */
    long max_positions;
    void *slab; /* all packed weights */
    pool *workers;
    /* buffers of inference, grown on demand */
    void *buffer;
    size_t buffer_bytes;
    void *free_tape; /* one finished tape kept for the next training pass */
} net;

/* Keys and values of many streams, in blocks of 16 tokens that several streams may share.
 * K is [L][G][blocks][Cp][16] (lanes run over keys), V is [L][G][blocks][16][Cp] (lanes run over the head).
 * Tokens 16*i .. 16*i+15 of slot s lie in block table[s * width + i]. */
typedef struct {
    float *k, *v;
    const int32_t *table;
    long width, blocks;
} kv_store;

INLINE float *kv_at(const float *base, const kv_store *kv, long Cp, long groups, long layer, long group, long block) {
    return (float *)base + (((layer * groups + group) * kv->blocks + block) * LANES) * Cp;
}

typedef struct {
    long rows;
    const int32_t *tokens, *positions, *slots;
    kv_store kv;
    long wants;
    const int32_t *want;
} row_batch;

/* Activations of one layer. In inference all layers share one set and the fields marked T are NULL. */
typedef struct {
    float *x;        /* [R][Dp] input of the layer */
    float *raw;      /* T [R][Nqkv] projections before norm and rotation */
    float *q;        /* [R][Hq] normed, rotated and scaled queries */
    float *lse;      /* T [R][H] log-sum-exp of the scores */
    float *attn;     /* T [R][Hq] attention output */
    float *mid;      /* [R][Dp] after attention; may be x itself in inference */
    float *normed;   /* [R][Dp] input of router and experts */
    float *logits;   /* [R][Ep] router logits */
    float *weight;   /* [R][K] weight of each chosen expert */
    int32_t *ids;    /* [R][K] chosen experts, ascending */
    int32_t *slot;   /* [R][K] row of `out` that holds this choice, -1: not computed */
    int32_t *order;  /* [R*K] inverse: row * K + choice of each slot */
    int64_t *starts; /* [E+1] first slot of each expert */
    float *gate_up;  /* T [R*K][2Fp] */
    float *out;      /* [R*K][Dp] expert outputs */
} layer_state;

/* One pass over a layer. `forced` is [R][L][K] or NULL; `chosen` and `natural` ([R][L][K]) receive the routes used and the
 * router's own choice (`natural` may be NULL). `active` marks rows that the experts must compute (NULL: all). */
typedef struct {
    net *n;
    const row_batch *b;
    layer_state *s;
    const layer_state *previous; /* its expert outputs are still to be added; NULL in layer 0 */
    const int64_t *forced;
    const uint8_t *active;
    int32_t *chosen, *natural;
    int index;
    long block; /* rows of one task */
} layer_pass;

/* forward.c */
int reserve_scratch(net *n, long longest);
void layer_forward(layer_pass *pass);
void embed_rows(const net *n, const row_batch *b, float *x);
void combine_row(const net *n, const layer_state *s, long row, float *out);
float norm_row(const float *x, const float *gain, long dim, long padded, float eps, float *out); /* returns 1 / rms */
void rotate_head(const net *n, const float *x, long position, float *out);

/* attention.c */
size_t attend_scratch(const net *n, long longest);
void attend_rows(const net *n, const row_batch *b, int layer, const float *q, long first, long count, float *out, float *lse,
                 void *scratch);
size_t attend_backward_scratch(const net *n, long longest);
void attend_backward(const net *n, const row_batch *b, int layer, const layer_state *s, const float *d_out, float *d_qkv, long first,
                     long count, long group, void *scratch);

/* experts.c */
void router_exponentials(const net *n, const float *logits, float top, float *e);
void route_row(const net *n, const float *logits, const int64_t *forced, int32_t *ids, int32_t *natural, float *weight);
void group_by_expert(const net *n, long rows, const uint8_t *active, layer_state *s);
void experts_forward(net *n, int layer, layer_state *s);
long expert_task(const net *n, const layer_state *s, long chunk, long task, long *first, long *count); /* returns the expert */
long expert_tasks(const net *n, const layer_state *s, long chunk);
void gated_row(const float *gate_up, long padded, float *out);

/* head.c */
void head_logits(net *n, const float *hidden, long rows, float *logits);
void score_row(const float *logits, long vocab, float temperature, long target, float *logprob, float *entropy);

#endif
