// Which instructions a 64-bit Arm processor has, as the system tells it.
#pragma once

namespace edgedec {

bool has_dots();  // sums of four products of bytes (FEAT_DotProd)
bool has_i8mm();  // products of matrices of bytes (FEAT_I8MM)

}  // namespace edgedec
