/* The one matrix kernel. Every output element is
 *     acc = 0;  for k = 0 .. K-1:  acc = fma(A[r, k], B[k, n], acc)
 * in this order, whatever the number of rows, the tile or the thread: lanes run over n, never over k. */
#ifndef STROP_GEMM_H
#define STROP_GEMM_H

#include "vec.h"

#define TILE 6 /* rows of a full tile: 12 accumulators, 2 columns vectors and 1 broadcast fill 16 registers */

typedef enum {
    STORE,    /* C = acc */
    CONTINUE, /* acc starts from C: goes on with a longer sum */
    ADD       /* C = C + acc */
} gemm_mode;

/* C[rows x 16*panels] from A[rows x k] (row stride lda) and panels of B: row stride ldb, panel stride ldp; C row stride ldc,
 * panels of C adjacent. Any number of rows. */
void gemm(long rows, long panels, long k, const float *a, long lda, const float *b, long ldb, long ldp, float *c, long ldc, gemm_mode mode);

/* The same with A given transposed: A[k x rows], row stride lda. */
void gemm_t(long rows, long panels, long k, const float *a, long lda, const float *b, long ldb, long ldp, float *c, long ldc,
            gemm_mode mode);

/* Pack W[n x k] (row major, stride ldw) into panels [ceil(n/16)][k][16], missing columns 0: B of  X W^T. */
void pack_transposed(const float *w, long ldw, long n, long k, float *out);

/* Pack W[k x n] (row major, stride ldw) into panels [ceil(n/16)][k][16], missing columns 0: B of  X W. */
void pack_plain(const float *w, long ldw, long k, long n, float *out);

#endif
