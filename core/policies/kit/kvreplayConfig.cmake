# kvreplay's development kit: policies that are compiled apart and loaded by `kvreplay replay --plugin mine.so`.
#
#   find_package(kvreplay REQUIRED)
#   kvreplay_add_plugin(mine mine.cpp)
if(NOT TARGET kvreplay::policies)
  add_library(kvreplay::policies INTERFACE IMPORTED)
  get_filename_component(kvreplay_headers "${CMAKE_CURRENT_LIST_DIR}/../../../include/kvreplay" ABSOLUTE)
  target_include_directories(kvreplay::policies INTERFACE ${kvreplay_headers})
  target_compile_features(kvreplay::policies INTERFACE cxx_std_20)
endif()

# A plug-in TARGET.so of the sources that follow. It calls functions of the program or the Python module that loads it.
# Both have the soname of this empty library, so that the system's loader finds them by the name that a plug-in needs.
function(kvreplay_add_plugin target)
  if(NOT TARGET kvreplay_engine)
    file(CONFIGURE OUTPUT kvreplay_engine.cpp CONTENT "")
    add_library(kvreplay_engine SHARED ${CMAKE_CURRENT_BINARY_DIR}/kvreplay_engine.cpp)
  endif()
  add_library(${target} MODULE ${ARGN} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin_stamp.cpp)
  set_target_properties(${target} PROPERTIES PREFIX "" SUFFIX .so SKIP_BUILD_RPATH ON)
  target_link_libraries(${target} PRIVATE kvreplay::policies kvreplay_engine)
  target_link_options(${target} PRIVATE LINKER:-z,undefs LINKER:--no-as-needed)
  # Policies work on every token of every layer: optimised, where the project does not say.
  target_compile_options(${target} PRIVATE $<$<CONFIG:>:-O2>)
endfunction()
