// Compiles what lies between the two for an instruction set, whatever the compiler's flags say.
//
// Between them there are only functions of an anonymous namespace, and none of the standard library's: a template or
// an inline function that two sources share is kept once by the linker, and a lesser CPU could get the wrong copy.
#pragma once

#define EAGLE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define EAGLE_TARGET_BEGIN(features) \
  EAGLE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define EAGLE_TARGET_END EAGLE_PRAGMA(clang attribute pop)
#else
#define EAGLE_TARGET_BEGIN(features) EAGLE_PRAGMA(GCC push_options) EAGLE_PRAGMA(GCC target(features))
#define EAGLE_TARGET_END EAGLE_PRAGMA(GCC pop_options)
#endif
