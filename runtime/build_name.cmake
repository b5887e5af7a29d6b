# Writes OUTPUT, a source file with the names of this build. Its digest covers the listed sources, whose
# paths lie below ROOT, FLAGS and SETTINGS: where these are equal, so is the digest, on every machine.
#   cmake -DROOT=... -DLIST=... -DFLAGS=... -DSETTINGS=... -DVERSION=... -DOUTPUT=... -P build_name.cmake
file(STRINGS ${LIST} sources)
set(digests "${SETTINGS}\n${FLAGS}")
foreach(source IN LISTS sources)
  file(SHA256 ${ROOT}/${source} digest)
  string(APPEND digests "\n${source} ${digest}")
endforeach()
string(SHA256 digest "${digests}")
string(SUBSTRING ${digest} 0 12 digest)
file(
  CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#include "runtime/group/build_name.hpp"

namespace sluice {
// Volatile: it stands in the program as one text, which tests replace.
static const char* const volatile text = "@VERSION@ build @digest@ (@SETTINGS@)";
std::string build_name() { return text; }
}  // namespace sluice
]] @ONLY)
