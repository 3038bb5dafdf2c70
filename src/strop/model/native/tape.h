/* What a training pass keeps between forward and backward, and the room that backward works in. */
#ifndef STROP_TAPE_H
#define STROP_TAPE_H

#include "net.h"

typedef struct tape {
    size_t bytes; /* of the whole block, this header included */
    row_batch b;  /* its arrays live in the block */
    long streams, longest;
    int32_t *tokens, *positions, *slots, *want;
    int64_t *first;            /* [streams + 1] first row of each stream */
    int32_t *table;            /* [streams][width] blocks of keys and values, in order */
    int64_t *targets;          /* [W] */
    uint8_t *active;           /* [R] rows whose logits are wanted */
    layer_state *layer;        /* [L] */
    float *keys, *values;      /* [L][G][blocks][16*Cp] */
    float *last, *hidden;      /* [W][Dp] before and after the last norm */
    float *scores;             /* [W][Vp] logits, NULL where they are too large to keep; backward writes their gradient over them */
    float *logprobs, *entropy; /* [W] as returned */
    float temperature;
} tape;

/* Backward's own arrays; one layer at a time. */
typedef struct {
    float *dx;               /* [R][Dp] gradient of the residual stream */
    float *d_normed;         /* [R][Dp] gradient of a norm's output */
    float *normed;           /* [R][Dp] recomputed output of the first norm */
    float *d_attn;           /* [R][Hq] */
    float *d_qkv;            /* [R][Nqkv] */
    float *d_logits;         /* [R][Ep] */
    float *d_weight;         /* [R][K] */
    float *gains;            /* [blocks][Dp] or [blocks][2Cp + Dp]: gradients of norm gains, summed in block order */
    float *d_hidden;         /* [W][Dp] */
    float *d_scores;         /* [HEAD_ROWS][Vp] */
    float *d_embed, *d_head; /* [Vp][Dp]; the same when tied */
    long *by_size;           /* [E] experts, largest first */
} gradient_room;

typedef struct {
    net *n;
    tape *t;
    gradient_room room;
    const float *g_logprob, *g_entropy; /* [W] */
    const float *g_router;              /* [L][R][E] or NULL */
    raw_weights *grads;                 /* every value is written */
    int index;                          /* layer at work */
    long from;                          /* head: first wanted row of the chunk */
} backward_pass;

#define HEAD_TASK 24   /* wanted rows of one task */
#define HEAD_ROWS 240  /* wanted rows whose score gradients exist at a time */
#define EXPERT_ROWS 96 /* rows of an expert at a time */

/* backward.c */
void norm_row_backward(const float *x, const float *gain, const float *d_out, long dim, long padded, float eps, float *d_x, float *d_gain);
void layer_backward(backward_pass *p);

/* experts_backward.c */
size_t experts_backward_scratch(const net *n);
void experts_backward(backward_pass *p);
void route_row_backward(const net *n, const float *logits, const int32_t *ids, const float *weight, const float *d_weight, float *d_logits);

/* gradients.c: weight gradients */
size_t weight_scratch(const net *n);
long weight_tasks(long rows);
void output_weight_task(backward_pass *p, long task, void *scratch);
void router_weight_task(backward_pass *p, long task, void *scratch);
void qkv_weight_task(backward_pass *p, long task, void *scratch);
void sum_gains(const float *gains, long blocks, long stride, long dim, float *out);

/* head_backward.c */
void head_forward_train(net *n, tape *t);
size_t head_scratch(const net *n);
void head_backward(backward_pass *p);

#endif
